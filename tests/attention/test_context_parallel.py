"""Attention whose sequence is sharded: it equals attention on one device in float64, and exchanges no more than it needs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import ContextParallel, explain, unzigzag, zigzag
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax.ops.attention.context_parallel import attend as shard_attend
from jaxsoftmax.ops.attention.context_parallel import choose, merge, visible
from jaxsoftmax.ops.attention.context_parallel.shard import shard_of

from ..support import cases, kernels, oracle, xla_cuda
from ..support.attention import gradients as backward
from ..support.attention import oracle as attention_oracle
from ..support.attention import values as forward


def attend(*arrays, **arguments):
    """Calls attention; the fields of a `ContextParallel` may stand among the arguments."""
    fields = {field.name: arguments.pop(field.name) for field in dataclasses.fields(ContextParallel) if field.name in arguments}
    if (table := arguments.pop("table", None)) is not None:
        arguments |= functions_of(table)
    return jaxsoftmax.dot_product_attention(*arrays, **arguments, **({"parallel": ContextParallel(**fields)} if fields else {}))


def functions_of(table):
    """Returns a score function with a table of heads and distances, and a mask function, by the names of the arguments."""
    middle = table.shape[1] // 2

    def score_mod(score, batch, head, query_index, key_index):
        return score * (1 + 0.1 * batch.astype(score.dtype)) + table[head, query_index - key_index + middle]

    def mask_mod(batch, head, query_index, key_index):
        return (key_index <= query_index + 2) | ((query_index // 3) % 2 == batch) | (head == 1)

    return {"score_mod": score_mod, "mask_mod": mask_mod}


pytestmark = [pytest.mark.usefixtures("hollow_kernels"), pytest.mark.filterwarnings("ignore:.*custom_partitioning.*")]
X64 = pytest.mark.usefixtures("x64")

DEVICES = 4
MOVING = ("query", "key", "value", "bias", "sinks", "table")
# Kinds of the mesh axes that a sequence is sharded over: automatic, explicit, or of a shard_map that checks what varies or not.
KINDS = ("auto", "explicit", "checked", "unchecked")
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter", "all-reduce")


def slow(*args):
    return pytest.param(*args, marks=pytest.mark.slow)


# Values.


def numbers(rng, *shape):
    return rng.standard_normal(shape)


def some(rng, size):
    return rng.integers(size // 3, size + 1, 2).astype(np.int32)


# Functions that return more operands and options, by the name of a feature.
FEATURES = {
    "plain": lambda rng, length, keys, heads: ({}, {}),
    "causal": lambda rng, length, keys, heads: ({}, {"is_causal": True}),
    "window": lambda rng, length, keys, heads: ({}, {"local_window_size": (5, 1)}),
    "right": lambda rng, length, keys, heads: ({}, {"local_window_size": (None, 2)}),
    "wide": lambda rng, length, keys, heads: ({}, {"local_window_size": (18, 9)}),
    "offset": lambda rng, length, keys, heads: ({"query_offset": np.array([3, -5], np.int32)}, {"is_causal": True}),
    "lengths": lambda rng, length, keys, heads: (
        {"query_seq_lengths": some(rng, length), "key_value_seq_lengths": some(rng, keys)},
        {"is_causal": True},
    ),
    "means": lambda rng, length, keys, heads: (
        {"query_seq_lengths": some(rng, length), "key_value_seq_lengths": some(rng, keys)},
        {"local_window_size": (2, 0), "fully_masked_rows": "mean"},
    ),
    "segments": lambda rng, length, keys, heads: (
        {
            "query_segment_ids": np.sort(rng.integers(0, 3, (2, length))).astype(np.int32),
            "key_value_segment_ids": np.sort(rng.integers(0, 3, (2, keys))).astype(np.int32),
        },
        {},
    ),
    "mask": lambda rng, length, keys, heads: ({"mask": rng.random((2, 1, length, keys)) < 0.6}, {}),
    "mask of keys": lambda rng, length, keys, heads: ({"mask": rng.random((1, 1, 1, keys)) < 0.6}, {"is_causal": True}),
    "bias": lambda rng, length, keys, heads: ({"bias": numbers(rng, 1, heads, length, keys)}, {"is_causal": True}),
    "bias of keys": lambda rng, length, keys, heads: ({"bias": numbers(rng, heads, 1, keys)}, {}),
    "bias of queries": lambda rng, length, keys, heads: ({"bias": numbers(rng, 2, 1, length, 1)}, {"is_causal": True}),
    "sinks": lambda rng, length, keys, heads: ({"sinks": numbers(rng, heads)}, {"is_causal": True}),
    "functions": lambda rng, length, keys, heads: ({"table": numbers(rng, heads, 2 * max(length, keys))}, {}),
    "soft cap": lambda rng, length, keys, heads: ({}, {"logits_soft_cap": 1.5, "is_causal": True}),
    "dropout": lambda rng, length, keys, heads: ({}, {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0)}),
}


def case(features, seed=0, length=16, keys=16, heads=4, key_heads=4):
    """Makes operands by name, and options."""
    rng, options = np.random.default_rng(seed), {}
    operands = {"query": numbers(rng, 2, length, heads, 4)}
    operands |= {name: numbers(rng, 2, keys, key_heads, size) for name, size in (("key", 4), ("value", 5))}
    for feature in features:
        more, own = FEATURES[feature](rng, length, keys, heads)
        operands, options = operands | more, options | own
    return operands, options


def loss(out, lse):
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse == -jnp.inf, 0, lse)))


def with_gradients(f):
    """Returns a function that computes `f(operands)`, and the derivatives of its loss."""

    def both(operands):
        moving = {name: array for name, array in operands.items() if name in MOVING}

        def total(moving):
            results = f(operands | moving)
            return loss(*results), results

        (_, results), derivatives = jax.value_and_grad(total, has_aux=True)(moving)
        return results, derivatives

    return both


def sequence_axes(name, array, replicated_queries=False):
    """Returns the axes of an operand that tokens lie along, and those of them that are sharded."""
    if name in ("query", "query_segment_ids"):
        return [1], [] if replicated_queries else [1]
    if name in ("key", "value", "key_value_segment_ids"):
        return [1], [1]
    if name in ("mask", "bias"):
        own = [axis for axis in (array.ndim - 2, array.ndim - 1) if array.shape[axis] > 1]
        return own, [] if replicated_queries else own[:1] if array.shape[-2] > 1 else []
    return [], []


def reordered(array, n, axis, is_undone=False):
    """Puts an array into zigzag order, or restores its order."""
    blocks = np.split(np.asarray(array), 2 * n, axis)
    order = [block for device in range(n) for block in (device, 2 * n - 1 - device)]
    return np.concatenate([blocks[i] for i in (np.argsort(order) if is_undone else order)], axis)


def ordered(operands, n, is_undone=False):
    """Puts operands, or their derivatives, into zigzag order, or restores their order."""
    if n is None:
        return operands
    result = {}
    for name, array in operands.items():
        for axis in sequence_axes(name, array)[0]:
            array = reordered(array, n, axis, is_undone)
        result[name] = array
    return result


def spec_of(name, array, over, replicated_queries=False):
    cut = sequence_axes(name, array, replicated_queries)[1]
    return P(*(over if axis in cut else None for axis in range(array.ndim)))


def of_arrays(f, **options):
    """Returns a function of a dict of arrays, from one that takes them by name."""
    return lambda operands: f(**operands, **options)


def mesh_of(kind, shape=(DEVICES,), names=("x",)):
    kinds = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices("cpu")[: int(np.prod(shape))])


def sharded(kind, operands, options, *, n=None, replicated_queries=False, gradients=True, shape=(DEVICES,), names=("x",)):
    """Computes attention of a sharded sequence and its derivatives in the usual order; returns the program's text too."""
    mesh, operands = mesh_of(kind, shape, names), ordered(operands, n)
    options = options | {"return_residual": True, "zigzag": n}
    specs = {name: spec_of(name, array, names, replicated_queries) for name, array in operands.items()}
    f = of_arrays(attend, **options)
    if kind in ("checked", "unchecked"):
        out = P() if replicated_queries else P(None, names)
        local = functools.partial(attend, axis_name=names, replicated_queries=replicated_queries, **options)
        f = jax.shard_map(
            lambda operands: local(**operands), mesh=mesh, in_specs=(specs,), out_specs=(out, out), check_vma=kind == "checked"
        )
    with jax.set_mesh(mesh):
        operands = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in operands.items()}
        compiled = jax.jit(with_gradients(f) if gradients else f).lower(operands).compile()
        results = compiled(operands)
    results, derivatives = jax.tree.map(np.asarray, results if gradients else (results, {}))
    if n is not None:
        results, derivatives = (
            [reordered(result, n, 1, is_undone=True) for result in results],
            ordered(derivatives, n, is_undone=True),
        )
    return tuple(results), derivatives, compiled.as_text()


@functools.cache
def expected_of(features, **shapes):
    """Computes attention on one device, and its derivatives."""
    operands, options = case(features, **shapes)
    with kernels.anew():  # on no mesh
        results = jax.jit(with_gradients(lambda operands: attend(**operands, **options, return_residual=True)))(operands)
    return jax.tree.map(np.asarray, results)


def check(kind, features, *, n=None, replicated_queries=False, more=None, over=None, **shapes):
    operands, options = case(features, **shapes)
    expected = expected_of(tuple(features), **shapes)
    *actual, text = sharded(kind, operands, options | (more or {}), n=n, replicated_queries=replicated_queries, **over or {})
    oracle.assert_same_in_float64(tuple(actual), expected)
    return text


def counted(text):
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}


# All devices give the values of one device.

SETS = [("causal",), ("window", "sinks", "soft cap"), ("mask", "dropout"), ("lengths", "segments"), ("bias", "offset")]
MORE = [("plain", "dropout"), ("right", "bias of keys"), ("mask of keys", "sinks"), ("means",), ("bias of queries",)]


# Quick cases have three devices, for a first, a middle and a last step of a ring, or two. Slow ones have four.
QUICK = [
    ("auto", "ring", None, SETS[1], 3),
    ("explicit", "ring", 2, SETS[2], 2),
    ("checked", "ring", 3, SETS[0], 3),
    ("unchecked", "ring", None, SETS[4], 3),
    ("checked", "all_gather", 4, SETS[3], 2),
    ("explicit", "all_gather", None, SETS[0], 2),
    ("auto", "all_to_all", 2, SETS[2], 2),
    ("unchecked", "all_to_all", None, SETS[1], 2),
    ("auto", "ring", None, ("functions",), 3),
    ("checked", "ring", 3, ("functions", "sinks"), 3),
    ("unchecked", "all_gather", 2, ("functions", "offset"), 2),
    ("explicit", "all_to_all", 2, ("functions", "lengths"), 2),
]
EVERY = [
    slow(kind, way, n, features, DEVICES)
    for kind in KINDS
    for way in ("ring", "all_gather", "all_to_all")
    for n in (None, DEVICES, 2, 1)
    if way != "ring" or n in (None, DEVICES)
    for features in (*SETS, *MORE)
]


@X64
@pytest.mark.parametrize(("kind", "way", "n", "features", "devices"), [*QUICK, *EVERY], ids=str)
def test_a_sequence_that_is_sharded_gives_what_a_whole_one_does(kind, way, n, features, devices):
    size = 12 if devices == 3 else 16
    check(kind, features, n=n, more={"strategy": way}, over={"shape": (devices,)}, length=size, keys=size)


@X64
@pytest.mark.parametrize(
    ("kind", "features"),
    [("auto", SETS[0])]
    + [slow(kind, features) for kind in KINDS for features in (*SETS, *MORE) if (kind, features) != ("auto", SETS[0])],
    ids=str,
)
def test_of_more_keys_than_queries_heads_that_share_keys_and_two_axes_of_the_mesh(kind, features):
    over = {"shape": (2, 2), "names": ("a", "b")}
    check(kind, features, keys=32, key_heads=2, more={"strategy": "ring"}, over=over)


@X64
def test_a_length_that_devices_cannot_share_evenly():
    operands, options = case(("causal",))
    f = with_gradients(
        lambda operands: attend(**{name: x[:, :14] for name, x in operands.items()}, **options, return_residual=True)
    )
    with jax.set_mesh(mesh_of("auto")):
        placed = {name: jax.device_put(x, NamedSharding(mesh_of("auto"), P(None, "x"))) for name, x in operands.items()}
        actual = jax.jit(f)(placed)
    oracle.assert_same_in_float64(actual, jax.jit(f)(operands))


@X64
@pytest.mark.parametrize("kind", ["checked", *map(slow, ("auto", "explicit", "unchecked"))])
def test_one_device_has_whole_sequences(kind):
    text = check(kind, ("window", "dropout"), n=4, over={"shape": (1,)})
    assert not any(counted(text).values())


@X64
@pytest.mark.parametrize("kind", ["auto", slow("explicit")])
def test_a_shard_map_around_may_leave_other_axes(kind):
    """The batch is sharded over a mesh axis that the shard_map leaves alone."""
    operands, options = case(("causal", "sinks"))
    f = of_arrays(attend, **options, return_residual=True)
    expected, mesh = jax.jit(with_gradients(f))(operands), mesh_of(kind, (2, 2), ("b", "x"))
    specs = {name: spec_of(name, array, "x") for name, array in operands.items()}
    with jax.set_mesh(mesh):
        placed = {n: P(*("b" if n != "sinks" else None, *specs[n][1:])) for n in operands}
        shards = {name: jax.device_put(array, NamedSharding(mesh, placed[name])) for name, array in operands.items()}
        local = functools.partial(attend, axis_name="x", strategy="ring", return_residual=True, **options)
        over = {"in_specs": (specs,), "out_specs": P(None, "x"), "axis_names": {"x"}}
        compiled = jax.jit(with_gradients(jax.shard_map(lambda operands: local(**operands), **over))).lower(shards).compile()
        actual = compiled(shards)
    assert not counted(compiled.as_text())["all-gather"]
    oracle.assert_same_in_float64(actual, expected)


@X64
@pytest.mark.parametrize("constrained", [False, True])
def test_operands_may_be_on_no_mesh_where_one_is_set(constrained):
    operands, options = case(("causal",))

    def f(operands):
        if constrained:
            operands = {name: jax.lax.with_sharding_constraint(array, P(None, "x")) for name, array in operands.items()}
        return attend(**operands, **options, strategy="ring" if constrained else None)

    expected = attend(**operands, **options)
    with jax.set_mesh(mesh_of("auto")):
        compiled = jax.jit(f).lower(operands).compile()
        oracle.assert_same_in_float64(compiled(operands), expected)
    assert bool(counted(compiled.as_text())["collective-permute"]) == constrained


@X64
@pytest.mark.parametrize("n", [slow(None), slow(1), 2, slow(4), slow(8)])
def test_zigzag_order_is_undone_on_one_device(n):
    features = ("window", "mask", "dropout", "sinks", "lengths")
    (operands, options), expected = case(features), expected_of(features)
    f = with_gradients(lambda operands: attend(**operands, **options, return_residual=True, zigzag=n))
    results, derivatives = jax.jit(f)(ordered(operands, n))
    if n is not None:
        results, derivatives = (
            tuple(reordered(result, n, 1, is_undone=True) for result in results),
            ordered(derivatives, n, is_undone=True),
        )
    oracle.assert_same_in_float64((tuple(results), derivatives), expected)


@X64
@pytest.mark.parametrize("n", [None, slow(2)])
@pytest.mark.parametrize("kind", ["explicit", *map(slow, ("auto", "checked", "unchecked"))])
def test_replicated_queries_merge_states_in_one_collective(kind, n):
    features = ("sinks", "lengths", "bias of keys", "dropout")
    check(kind, features, n=n, replicated_queries=True, over={"shape": (2,)})
    text = sharded(kind, *case(("causal", "offset")), n=n, replicated_queries=True, gradients=False, shape=(2,))[2]
    expected = {"all-reduce": 1} if kind in ("checked", "unchecked") else {"all-gather": 1}
    assert {name: count for name, count in counted(text).items() if count} == expected


@X64
@pytest.mark.parametrize("kind", ["checked", slow("unchecked"), slow("explicit")])
def test_many_replicated_queries_are_summed_up(kind, monkeypatch):
    monkeypatch.setattr(merge, "MOST_GATHERED_NUMBERS", 0)
    check(kind, ("sinks", "lengths"), replicated_queries=True)


@X64
@pytest.mark.parametrize("kind", ["auto", slow("explicit")])
def test_queries_alone_are_sharded_and_nothing_is_sent(kind):
    operands, options = case(("window", "sinks", "dropout", "bias"))
    expected = expected_of(("window", "sinks", "dropout", "bias"))
    mesh = mesh_of(kind, (2,))
    with jax.set_mesh(mesh):
        specs = {"query": P(None, "x")}
        shards = {n: jax.device_put(array, NamedSharding(mesh, specs.get(n, P()))) for n, array in operands.items()}
        f = of_arrays(attend, **options, return_residual=True)
        forward = jax.jit(f).lower(shards).compile()
        assert not any(counted(forward.as_text()).values())
        compiled = jax.jit(with_gradients(f)).lower(shards).compile()
        assert {name for name, count in counted(compiled.as_text()).items() if count} <= {"all-reduce", "all-gather"}
        oracle.assert_same_in_float64(compiled(shards), expected)


@X64
@pytest.mark.parametrize("kind", ["explicit", slow("auto")])
def test_queries_and_keys_over_axes_of_their_own(kind):
    operands, options = case(("window", "sinks", "dropout", "bias"))
    expected = expected_of(("window", "sinks", "dropout", "bias"))
    mesh = mesh_of(kind, (2, 2), ("a", "b"))
    with jax.set_mesh(mesh):
        specs = {"query": P(None, "a"), "key": P(None, "b"), "value": P(None, "b")}
        shards = {n: jax.device_put(array, NamedSharding(mesh, specs.get(n, P()))) for n, array in operands.items()}
        actual = jax.jit(with_gradients(lambda operands: attend(**operands, **options, return_residual=True)))(shards)
        oracle.assert_same_in_float64(actual, expected)


@X64
@pytest.mark.parametrize("kind", [slow("auto"), "explicit", *map(slow, ("checked", "unchecked"))])
def test_second_derivatives_tangents_and_vmap(kind):
    operands, _ = case(("causal", "sinks"), length=12, keys=12)
    mesh = mesh_of(kind, (3,))
    moving = {name: operands[name] for name in MOVING if name in operands}
    specs = {name: spec_of(name, array, "x") for name, array in moving.items()}
    f = functools.partial(attend, is_causal=True, return_residual=True)
    g = of_arrays(f)
    ring = functools.partial(f, strategy="ring")
    on_mesh = of_arrays(ring)
    if kind in ("checked", "unchecked"):
        over = {"mesh": mesh, "in_specs": (specs,), "out_specs": P(None, "x"), "check_vma": kind == "checked"}
        on_mesh = jax.shard_map(lambda operands: ring(**operands, axis_name="x"), **over)

    def transformed(f):
        def both(moving):
            tangents = jax.tree.map(jnp.cos, moving)
            first = jax.jvp(f, (moving,), (tangents,))
            second = jax.jvp(jax.grad(lambda moving: loss(*f(moving))), (moving,), (tangents,))
            return first, second

        return both

    expected = jax.jit(transformed(g))(moving)
    several = {name: np.stack([array, 2 * array]) for name, array in moving.items()}
    with jax.set_mesh(mesh):
        shards = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in moving.items()}
        oracle.assert_same_in_float64(jax.jit(transformed(on_mesh))(shards), expected)
        shards = {n: jax.device_put(array, NamedSharding(mesh, P(None, *specs[n]))) for n, array in several.items()}
        oracle.assert_same_in_float64(jax.jit(jax.vmap(on_mesh))(shards), jax.vmap(g)(several))


@X64
@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@drawn(
    st.sampled_from(KINDS),
    st.sampled_from([None, "ring", "all_gather", "all_to_all"]),
    st.sampled_from([None, DEVICES]),
    st.lists(st.sampled_from(sorted(FEATURES)), min_size=1, max_size=4, unique=True),
    st.sampled_from([4, 8]),
)
def test_any_features_together(kind, way, n, features, heads):
    if {"bias", "bias of keys", "bias of queries"} <= set(features):
        features = [name for name in features if not name.startswith("bias of")]
    check(kind, features, n=n, heads=heads, more={"strategy": way})


# Collectives.


def shapes_in(text):
    return [tuple(map(int, shape.split(","))) for shape in re.findall(r"f64\[([\d,]+)\]", text)]


@X64
@pytest.mark.parametrize("which", ["ring", "keys"])
def test_a_batch_of_sinks_alone(which):
    """Only the first step has the sinks, and the other steps have their batch all the same."""
    operands, options = case(("sinks",))
    sinks, mesh = np.stack([operands.pop("sinks")] * 2) + np.arange(2)[:, None], mesh_of("explicit", (2,))
    specs = {name: P() if which == "keys" and name == "query" else P(None, "x") for name in operands}

    def f(operands, way=None):
        def one(sinks):
            return attend(**operands, **options, sinks=sinks, strategy=way, return_residual=True)

        return with_gradients(lambda moving: jax.vmap(one)(moving["sinks"]))({"sinks": sinks})

    expected = jax.jit(f)(operands)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in operands.items()}
        actual = jax.jit(functools.partial(f, way="ring" if which == "ring" else None))(placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), actual, expected)


COMBINED = "--xla_gpu_collective_permute_combine_threshold_bytes"  # up to this number of bytes XLA makes one collective


@X64
@pytest.mark.parametrize(
    ("kind", "n", "features"),
    [
        slow("auto", None, ("causal",)),
        ("checked", 8, ("causal", "sinks")),
        ("explicit", None, ("bias of keys", "wide")),
        slow("unchecked", 8, ("mask", "dropout")),
        slow("explicit", 8, ("lengths", "segments")),
        slow("checked", None, ("bias", "offset")),
        slow("auto", 8, ("wide", "soft cap")),
    ],
)
def test_a_long_ring_is_a_loop(kind, n, features, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{COMBINED}=0")
    monkeypatch.setattr(shard_attend, "MOST_UNROLLED", 2)
    text = check(kind, features, n=n, more={"strategy": "ring"}, over={"shape": (8,)}, length=32, keys=32)
    assert " while(" in text
    of_keys = 2 if "segments" in features else 1  # packed arrays: one of each dtype
    assert counted(text)["collective-permute"] < (2 * of_keys + 1) * 7 + of_keys  # if all steps were written out


@pytest.mark.parametrize("n", [None, 1024])
def test_a_thousand_devices_are_lowered_for_without_a_model_of_each_pair(n, monkeypatch):
    """NumPy models all devices at a time; a model of each pair of devices would take a minute."""
    asked, sees = [], visible.sees
    monkeypatch.setattr(visible, "sees", lambda *args: asked.append(args) or sees(*args))
    mesh = AbstractMesh((1024,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        x = jax.ShapeDtypeStruct((1, 2**21, 16, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x")))
        f = jax.jit(functools.partial(attend, is_causal=True, zigzag=n))
        text = f.trace(x, x, x).lower(lowering_platforms=("cpu",)).as_text()
    assert len(asked) < 4 * 1024
    assert text.count("stablehlo.while") > 1
    assert text.count("stablehlo.collective_permute") < 16


@X64
def test_states_of_many_devices_are_merged_in_a_loop(monkeypatch):
    monkeypatch.setattr(shard_attend, "MOST_UNROLLED", 2)
    assert " while(" in check(
        "explicit", ("lengths", "sinks"), replicated_queries=True, over={"shape": (6,)}, length=24, keys=24
    )


@X64
@pytest.mark.parametrize("n", [slow(None), 3])
def test_a_ring_sends_keys_step_by_step_and_no_device_has_all(n, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{COMBINED}=0")
    operands, options = case(("causal",), length=6 * 7, keys=6 * 11)
    local = functools.partial(attend, axis_name="x", strategy="ring", zigzag=n, return_residual=True, **options)
    specs = {name: P(None, "x") for name in operands}
    f = jax.shard_map(
        lambda operands: local(**operands),
        mesh=mesh_of("checked", (3,)),
        in_specs=(specs,),
        out_specs=P(None, "x"),
        check_vma=False,
    )
    forward = jax.jit(f).lower(operands).compile().as_text()
    assert {name: count for name, count in counted(forward).items() if count} == {"collective-permute": 2}
    text = jax.jit(with_gradients(f)).lower(operands).compile().as_text()
    counts = counted(text)
    # Keys with values twice, and their derivatives. The first step backward waits for keys and values that are not packed.
    assert counts["collective-permute"] == 3 * 2 + 1
    assert not counts["all-gather"]
    assert not counts["all-to-all"]
    assert not any({6 * 7, 6 * 11} & set(shape) for shape in shapes_in(text))


@X64
@pytest.mark.parametrize(("window", "steps"), [((3, 0), 1), ((4, 0), 1), ((5, 0), 2), ((3, 2), 2), ((None, 0), 3), (None, 3)])
def test_a_window_ends_the_ring_early(window, steps, monkeypatch):
    """Four devices have four tokens each: a query sees four keys before its own shard only if it sees five before itself."""
    monkeypatch.setenv("XLA_FLAGS", f"{COMBINED}=0")
    operands, _ = case(())
    local = functools.partial(attend, axis_name="x", local_window_size=window, strategy="ring")
    over = {"mesh": mesh_of("checked"), "in_specs": P(None, "x"), "out_specs": P(None, "x")}
    text = jax.jit(jax.shard_map(lambda operands: local(**operands), **over)).lower(operands).as_text()
    assert text.count("stablehlo.collective_permute") == steps


def test_devices_that_see_nothing_of_keys_get_none():
    sequences = shard_of_four(is_causal=True).sequences
    assert [visible.key_routes(sequences, step.shift, step.parts) for step in sequences.ring.steps] == [
        [(0, 0), (1, 1), (2, 2), (3, 3)],
        [(0, 1), (1, 2), (2, 3)],
        [(0, 2), (1, 3)],
        [(0, 3)],
    ]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, [1, 1, 1, 1]),
        ({"window": (8, 0)}, [1, 1]),
        ({"window": (None, 0), "n": 4}, [1, 1, 1, 1]),  # others' keys are seen by halves
        ({"window": (None, 0), "n": 4, "length": 64, "n_keys": 128}, [2, 2, 2, 2]),
        ({"window": (8, 0), "n": 4}, [2, 2, 1, 2]),
    ],
    ids=str,
)
def test_the_steps_of_a_ring(options, parts):
    schedule = shard_of_four(**options).sequences.ring
    is_halved = parts == [1, 1, 1, 1] and "n" in options
    assert [len(step.parts) for step in schedule.steps] == parts
    assert all(part.is_halved == (is_halved and step.shift > 0) for step in schedule.steps for part in step.parts)
    assert schedule.steps[0].parts[0].queries == slice(None)  # sums start there
    assert schedule.sequences.queries.n_pieces == (2 if "n" in options and not is_halved else 1)


def shard_of_four(length=32, heads=8, size=64, key_heads=None, n=None, n_keys=None, is_causal=False, window=(None, None)):
    """Makes the record of a shard on four devices; computes nothing."""
    shards, window = [], (None, 0) if is_causal else window

    def local(query, key, value):
        over = {"queries": Cut(("x",), 0), "keys": Cut(("x",), 0)}
        operands = {"query": query, "key": key, "value": value}
        shards.append(shard_of(None, operands, cuts=over, window=window, zigzag=n, scale=1.0))
        return query

    query = jax.ShapeDtypeStruct((1, length, heads, size), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, n_keys or length, key_heads or heads, size), jnp.bfloat16)
    mapped = jax.shard_map(local, mesh=mesh_of("checked"), in_specs=P(None, "x"), out_specs=P(None, "x"), check_vma=False)
    jax.eval_shape(mapped, query, key, key)
    return shards[0]


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ({"length": 65536, "heads": 16, "size": 128}, "ring"),
        ({"length": 65536, "heads": 16, "size": 128, "is_causal": True, "n": 4}, "ring"),
        ({"length": 65536, "heads": 16, "size": 128, "is_causal": True}, "all_to_all"),
        ({"length": 65536, "heads": 16, "key_heads": 2, "size": 128}, "ring"),
        ({"length": 512, "heads": 16, "key_heads": 2, "size": 128}, "all_gather"),
        ({"length": 4096, "heads": 16, "size": 128}, "all_to_all"),
        ({"length": 65536, "heads": 16, "size": 128, "is_causal": True, "n": 2}, "all_to_all"),
        ({"length": 65536, "heads": 6, "size": 128, "is_causal": True, "n": 2}, "all_gather"),
    ],
    ids=str,
)
def test_the_way_is_that_of_a_model_of_the_time(shape, way):
    assert choose.strategy_of(shard_of_four(**shape), None) == way


# Kernels run on shards.


def on_abstract_mesh(f, length=2048, heads=4, size=64):
    mesh = AbstractMesh((DEVICES,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        x = jax.ShapeDtypeStruct((1, length, heads, size), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x")))
        return kernels.lowered_for_cuda(f, x, x, x)


@pytest.mark.parametrize(("n", "size"), [(None, 36), slow(DEVICES, 64)])
def test_kernels_run_on_shards_and_steps_alike_have_one(n, size):
    """The first and the last forward step have kernels of their own. In zigzag order backward a device's own keys have one."""

    def f(*operands):
        out = attend(*operands, is_causal=True, strategy="ring", zigzag=n)
        return jnp.sum(out.astype(jnp.float32))

    text = on_abstract_mesh(jax.grad(f, (0, 1, 2)), size=size)
    kernels.assert_ran(text, "mosaic")
    names = kernels.kernel_names(text)
    assert sorted(names) == ["attention_backward_mosaic"] * (2 if n else 1) + ["attention_forward_mosaic"] * 3
    assert "collective_permute" in text
    assert "2048x2048" not in text
    assert "512x512" not in text


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_replicated_queries_of_a_shard_map_run_the_kernels(is_differentiated):
    mesh = AbstractMesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    local = functools.partial(attend, axis_name="x", replicated_queries=True)
    f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "x"), P(None, "x")), out_specs=P())
    types = [jax.ShapeDtypeStruct((2, length, heads, 64), jnp.bfloat16) for length, heads in ((8, 8), (4096, 2), (4096, 2))]
    if is_differentiated:
        f = jax.grad(lambda *operands, f=f: jnp.sum(f(*operands).astype(jnp.float32) ** 2), (0, 1, 2))
    text = kernels.lowered_for_cuda(f, *types)
    kernels.assert_ran(text, "mosaic")


@X64
def test_replicated_queries_on_one_device():
    """An axis of size 1 shares nothing, and its type has to say so."""
    check("checked", ("causal", "offset"), length=16, replicated_queries=True, over={"shape": (1,)})


def test_decoding_runs_the_kernel_for_few_queries_on_shards():
    mesh = AbstractMesh((DEVICES,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        query = jax.ShapeDtypeStruct((2, 1, 8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
        key = jax.ShapeDtypeStruct((2, 4096, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x")))
        size = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=NamedSharding(mesh, P()))
        text = kernels.lowered_for_cuda(
            lambda q, k, v, size: attend(q, k, v, key_value_seq_lengths=size, query_offset=size - 1, is_causal=True),
            query,
            key,
            key,
            size,
        )
    kernels.assert_ran(text, "mosaic")
    assert text.count("stablehlo.all_gather") == 1


def test_derivatives_that_are_written_in_place_are_not_fused_with_slices():
    """XLA makes one fusion of a kernel and contiguous slices of its operands, as in a batch of one: it writes elsewhere."""
    xla_cuda.skip_unless_it_compiles_for_absent_gpus()
    mesh = jax.sharding.Mesh(xla_cuda.mesh((2,), ("x",)).devices, ("x",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x")))

    def f(*operands):  # late queries and early keys have a kernel of their own, which takes a part of the sums
        out = attend(*operands, local_window_size=(700, 0), strategy="ring", zigzag=2)
        return jnp.sum(out.astype(jnp.float32))

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(f, (0, 1, 2))).lower(x, x, x).compile().as_text()
    functions, main = text.split("\nENTRY ")
    calls = [
        [line for line in part.splitlines() if " custom-call(" in line and "attention_backward" in line]
        for part in (functions, main)
    ]
    assert [len(own) for own in calls] == [0, 4]


@pytest.mark.parametrize(
    ("flags", "tokens", "is_packed"),
    [("", 3840, False), ("", 3841, True), (f"{COMBINED}={2**25}", 3841, False), (f"{COMBINED}=0", 64, True)],
)
def test_keys_and_values_are_packed_unless_xla_sends_them_together(flags, tokens, is_packed, monkeypatch):
    """Keys and values of the 3840 tokens of a device have 30 MiB."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((1, tokens * DEVICES, 16, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x")))
        text = kernels.lowered_for_cuda(lambda x: attend(x, x, x, strategy="ring"), x)
    assert text.count("stablehlo.collective_permute") == (1 if is_packed else 2) * (DEVICES - 1)
    assert ("stablehlo.concatenate" in text) is is_packed


@pytest.mark.parametrize("features", [(), ("mask",)], ids=str)
def test_export_of_an_unknown_batch_chooses_a_strategy(features):
    mesh = mesh_of("explicit")
    (batch,) = jax.export.symbolic_shape("b")
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "x"))
        x = jax.ShapeDtypeStruct((batch, 64, 4, 8), jnp.float32, sharding=sharding)
        mask = jax.ShapeDtypeStruct((batch, 1, 1, 64), bool, sharding=NamedSharding(mesh, P())) if features else None
        f = jax.jit(lambda q, k, v, mask: attend(q, k, v, mask=mask))
        text = jax.export.export(f, platforms=["cuda"])(x, x, x, mask).mlir_module()
    assert text.count("stablehlo.all_gather") == 2


def test_export_of_a_ring_of_an_unknown_batch():
    mesh = mesh_of("explicit")
    (batch,) = jax.export.symbolic_shape("b")
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((batch, 64, 4, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, "x")))
        f = jax.jit(lambda q, k, v: attend(q, k, v, strategy="ring"))
        text = jax.export.export(f, platforms=["cuda"])(x, x, x).mlir_module()
    assert text.count("stablehlo.collective_permute") == DEVICES - 1  # packed, as it may be large


@pytest.mark.parametrize(("tokens", "count"), [(3840, 2), (4096, 1)])
def test_xla_sends_together_what_is_not_packed(tokens, count, monkeypatch):
    xla_cuda.skip_unless_it_compiles_for_absent_gpus()
    monkeypatch.setenv("XLA_FLAGS", "")
    mesh = jax.sharding.Mesh(xla_cuda.mesh((2,), ("x",)).devices, ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((1, tokens * 2, 16, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x")))
        text = jax.jit(lambda q, k, v: attend(q, k, v, strategy="ring")).lower(x, x, x).compile().as_text()
    (results,) = re.findall(r" = (.*) collective-permute-start\(", text)
    assert results.count("bf16[") == 2 * count  # the operands are among them


def test_explain_shows_shards():
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x")))
        explanation = explain(lambda x: attend(x, x, x, strategy="ring"), x, platform="cuda")
    assert [decision.implementation for decision in explanation] == [
        "mosaic"
    ] * 3  # for the first, the middle and the last steps
    assert {decision.operands[0] for decision in explanation} == {"bfloat16[1,1,512,4,64]"}


# Native checks, on up to four GPUs: errors are within the budget of one device. The reference runs the same checks.

NATIVE = {
    "causal": ({}, {"is_causal": True}),
    "window, sinks, soft cap": (
        {"sinks": (4,)},
        {"local_window_size": (150, 0), "logits_soft_cap": 20.0},
    ),
    "dropout": ({}, {"is_causal": True, "dropout_rate": 0.2, "dropout_rng": 3}),
    "bias": ({"bias": (1, 4, 512, 512)}, {}),
    "mask": ({"mask": (2, 1, 512, 512)}, {}),
    "deterministic": ({}, {"is_causal": True, "deterministic_gradients": True}),
    "grouped heads": ({}, {"is_causal": True}),
    "window, one entry": ({}, {"local_window_size": (150, 0)}),
    "lengths": ({"query_seq_lengths": [500, 130], "key_value_seq_lengths": [512, 201]}, {"is_causal": True}),
    "segments": ({"query_segment_ids": None}, {"is_causal": True}),
}


def native_case(feature, size):
    more, options = NATIVE[feature]
    batch, heads = (1,) if feature == "window, one entry" else (2,), 8 if feature == "grouped heads" else 4
    operands = forward.arrays(batch, length=512, keys=512, heads=heads, key_heads=4, size=size, dtype="bfloat16")
    for name, value in more.items():
        if name in ("sinks", "bias", "mask"):
            operands[name] = forward.random(value, "mask" if name == "mask" else "bias")
        else:
            operands[name] = forward.segments(512, 1) if value is None else np.array(value, np.int32)
    if "query_segment_ids" in operands:
        operands["key_value_segment_ids"] = operands["query_segment_ids"]
    return operands, options


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("name", "kind", "way", "feature", "size"),
    [
        pytest.param(name, kind, way, feature, size, marks=marks)
        for name, marks in (("xla", pytest.mark.slow), ("mosaic", pytest.mark.gpu), ("triton", pytest.mark.gpu))
        for kind in ("explicit", "auto", "shard_map")
        for way in ("ring", "all_gather", "all_to_all")
        for feature in NATIVE
        for size in ((64, 128, 36) if (name, way, kind) == ("mosaic", "ring", "explicit") else (16 if name == "xla" else 64,))
        if kind == "explicit" or feature in ("window, sinks, soft cap", "bias", "lengths")
        if name != "triton" or (kind, way) == ("explicit", "ring")
    ],
)
def test_devices_are_within_the_budget_of_one(name, kind, way, in_order, feature, size):
    devices = cases.several("cpu" if name == "xla" else "gpu")[:4]
    operands, options = native_case(feature, size)
    n = None if in_order else len(devices)
    types = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(types,), devices=devices)
    own = ordered(operands, n)
    specs = {k: spec_of(k, a, "x") for k, a in own.items()}
    parallel = ContextParallel(way, zigzag=n, axis_name="x" if kind == "shard_map" else None)
    dout, dlse = backward.cotangents_like(
        (
            jax.ShapeDtypeStruct(operands["query"].shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(operands["query"].shape[:-1], jnp.float32),
        )
    )
    with jax.set_mesh(mesh):
        shards = {k: jax.device_put(a, NamedSharding(mesh, specs[k])) for k, a in own.items()}
        moving, fixed = forward.split(shards)
        f = forward.function(options | {"parallel": parallel}, {}, name)
        if kind == "shard_map":
            f = jax.shard_map(f, mesh=mesh, in_specs=(specs,), out_specs=P(None, "x"))
        both = tuple(reordered(a, n, 1) if n else a for a in (dout, dlse))
        both = tuple(jax.device_put(a, NamedSharding(mesh, P(None, "x"))) for a in both)
        pull = jax.jit(backward.pull_of(lambda moving: f(moving | fixed)))
        (out, lse), derivatives = pull(moving, both)
        again = pull(moving, both)
    out, lse, derivatives = jax.tree.map(np.asarray, (out, lse, derivatives))
    if options.get("deterministic_gradients") or name == "xla":
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, again), ((out, lse), derivatives))
    if n is not None:
        out, lse, derivatives = (
            reordered(out, n, 1, is_undone=True),
            reordered(lse, n, 1, is_undone=True),
            ordered(derivatives, n, is_undone=True),
        )
    truths = forward.truth_of(attention_oracle.attention, name, operands, options)
    for actual, truth in zip((out, lse), truths, strict=True):
        assert oracle.error(actual, truth) <= 1
    backward.assert_right(name, derivatives, operands, options, dout, dlse, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["causal", "deterministic", "dropout", "segments"])
@pytest.mark.parametrize("flags", ["", f"{COMBINED}=0"], ids=["as they are", "packed"])
def test_native_rings_whose_blocks_come_in_waves(flags, feature, monkeypatch):
    """On two multiprocessors blocks of small steps have tiles enough for several waves."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    with kernels.target(multiprocessors=2):
        test_devices_are_within_the_budget_of_one("mosaic", "explicit", "ring", False, feature, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["causal", "deterministic", "dropout", "segments"])
@pytest.mark.parametrize("in_order", [True, False])
def test_native_rings_that_are_loops(in_order, feature, monkeypatch):
    monkeypatch.setattr(shard_attend, "MOST_UNROLLED", 1)
    test_devices_are_within_the_budget_of_one("mosaic", "explicit", "ring", in_order, feature, 64)


@pytest.mark.parametrize("is_mapped", [True, False], ids=["shard_map", "explicit"])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *(pytest.param("mosaic", keys, marks=pytest.mark.gpu) for keys in (512, 8192)),
        ("xla", 64),
    ],
)
def test_decoding_over_a_cache_that_devices_share_is_within_the_budget_of_one(name, keys, is_mapped):
    devices = cases.several("cpu" if name == "xla" else "gpu")[:4]
    operands = forward.arrays(batch=(3,), length=1, keys=keys, heads=8, key_heads=2, size=128, dtype="bfloat16")
    lengths = np.array([keys, keys // 2 + 3, 5], np.int32)  # only the first device has keys of the last entry
    operands |= {"key_value_seq_lengths": lengths, "query_offset": lengths - 1}
    options = {"is_causal": True}
    mesh = jax.make_mesh(
        (len(devices),), ("x",), axis_types=(AxisType.Auto if is_mapped else AxisType.Explicit,), devices=devices
    )
    specs = {operand: spec_of(operand, array, "x", replicated_queries=True) for operand, array in operands.items()}
    f = of_arrays(attend, **options, implementation=name, return_residual=True)
    if is_mapped:
        local = of_arrays(attend, **options, implementation=name, return_residual=True, axis_name="x", replicated_queries=True)
        f = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(P(), P()))
    dout, dlse = backward.cotangents_like(
        (jax.ShapeDtypeStruct(operands["query"].shape, jnp.bfloat16), jax.ShapeDtypeStruct((3, 1, 8), jnp.float32))
    )
    with jax.set_mesh(mesh):
        shards = {operand: jax.device_put(array, NamedSharding(mesh, specs[operand])) for operand, array in operands.items()}
        moving, fixed = forward.split(shards)
        text = jax.jit(f).lower(shards).compile().as_text()
        (out, lse), derivatives = jax.jit(backward.pull_of(lambda moving: f(moving | fixed)))(moving, (dout, dlse))
    assert sum(counted(text).values()) == 1
    out, lse, derivatives = jax.tree.map(np.asarray, (out, lse, derivatives))
    truths = forward.truth_of(attention_oracle.attention, name, operands, options)
    for actual, truth in zip((out, lse), truths, strict=True):
        assert oracle.error(actual, truth) <= 1
    if not is_mapped:
        backward.assert_right(name, derivatives, operands, options, dout, dlse, lse)
        return
    truths = forward.truth_of(backward.tight, name, operands, options, dout, dlse)
    for operand, actual in derivatives.items():  # rounded twice, as the cotangent of a device's part has 16 bits too
        assert oracle.error(actual, truths[operand]) <= 2, operand


# Orders.


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_zigzag_pairs_early_and_late_blocks_and_unzigzag_is_its_inverse(n):
    x = np.arange(2 * n * 5 * 3).reshape(3, 2 * n * 5)
    in_zigzag = np.asarray(zigzag(x, n, axis=1))
    blocks = in_zigzag.reshape(3, n, 2, 5) // 5 % (2 * n)
    for device in range(n):
        assert set(blocks[0, device, 0]) == {device}
        assert set(blocks[0, device, 1]) == {2 * n - 1 - device}
    np.testing.assert_array_equal(unzigzag(in_zigzag, n, axis=-1), x)


ERRORS = {
    "n of floats": (lambda: zigzag(np.arange(8), 2.0), TypeError, ["zigzag: n", "int", "2.0"]),
    "n of 0": (lambda: zigzag(np.arange(8), 0), ValueError, ["zigzag: n", "at least 1"]),
    "odd": (lambda: unzigzag(np.arange(6), 2), ValueError, ["unzigzag: x", "multiple of 2 n = 4", "(6,)"]),
    "axis": (lambda: zigzag(np.arange(8), 2, axis=1), ValueError, ["axis", "got 1"]),
    "zigzag": (lambda: call(zigzag=3), ValueError, ["zigzag", "16 queries"]),
    "zigzag of strings": (lambda: call(zigzag="2"), TypeError, ["zigzag must be an int"]),
    "strategy": (lambda: call(strategy="rings"), ValueError, ["strategy", "'ring'", "'rings'"]),
    "strategy of whole sequences": (
        lambda: call(strategy="ring"),
        ValueError,
        ["parallel.strategy must be None", "no sequence is sharded", "'ring'", "axis_name"],
    ),
    "axis_name": (lambda: call(axis_name="nowhere"), ValueError, ["axis_name", "shard_map", "nowhere"]),
    "replicated_queries": (lambda: call(replicated_queries=True), ValueError, ["replicated_queries", "axis_name"]),
    "replicated_queries of 1": (lambda: call(replicated_queries=1), TypeError, ["replicated_queries", "True or False"]),
    "parallel": (lambda: call(parallel="ring"), TypeError, ["parallel", "ContextParallel", "'ring'"]),
    "axis_name of two": (lambda: call(axis_name=("x", "x")), ValueError, ["ContextParallel: axis_name", "each once"]),
    "strategy of numbers": (lambda: call(strategy=3), TypeError, ["ContextParallel: strategy", "3"]),
    "axis_name of numbers": (lambda: call(axis_name=(1,)), TypeError, ["ContextParallel: axis_name", "(1,)"]),
}


def call(**options):
    return attend(*(numbers(np.random.default_rng(0), 1, 16, 2, 4).astype(np.float32) for _ in range(3)), **options)


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_name_the_argument(kind):
    function, error, words = ERRORS[kind]
    with pytest.raises(error) as raised:
        function()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "ring", "zigzag": 2, "is_causal": True}, "zigzag=2, and there are 4 shards"),
        ({"strategy": "all_to_all"}, "4 devices cannot share 2 heads"),
    ],
)
def test_a_way_that_cannot_be_gone_says_why(options, words):
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        x = jax.device_put(np.zeros((1, 16, 2, 4), np.float32), NamedSharding(mesh, P(None, "x")))
        with pytest.raises(NotImplementedError, match=words):
            attend(x, x, x, **options)


def test_a_strategy_is_refused_where_types_say_that_sequences_are_whole():
    mesh = mesh_of("explicit")
    x = jax.device_put(np.zeros((4, 16, 4, 4), np.float32), NamedSharding(mesh, P("x")))
    ring = functools.partial(attend, strategy="ring")
    on_shards = jax.shard_map(lambda x: ring(x, x, x), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    for f in (lambda x: ring(x, x, x), on_shards):
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match=r"parallel\.strategy must be None where no sequence is sharded"),
        ):
            jax.jit(f)(x)
    one = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])  # the same program where there is one device
    jax.jit(lambda x: ring(x, x, x))(jax.device_put(np.zeros((4, 16, 4, 4), np.float32), NamedSharding(one, P(None, "x"))))


@X64
def test_a_strategy_is_taken_where_it_is_not_known_how_sequences_are_sharded():
    """On automatic axes the rule runs to undo the order, also where XLA leaves sequences whole."""
    operands, options = case(("causal",))
    mesh = mesh_of("auto")
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in ordered(operands, 2).items()}
        out = jax.jit(of_arrays(attend, **options, strategy="all_gather", zigzag=2))(placed)
    oracle.assert_same_in_float64(reordered(out, 2, 1, is_undone=True), attend(**operands, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kind", ["auto", "explicit", "checked"])
@pytest.mark.parametrize("way", ["ring", "all_gather", "all_to_all"])
def test_native_functions_of_positions_in_the_whole_sequence(way, kind, in_order):
    devices = cases.several("gpu")[:4]
    operands = forward.arrays((2,), length=512, keys=512, heads=4, key_heads=4, size=64, dtype="bfloat16")
    operands["table"] = numbers(np.random.default_rng(0), 4, 1024).astype(np.float32)
    wide = {name: np.asarray(array, np.float32) for name, array in operands.items()}
    with jax.default_device(jax.devices("cpu")[0]), kernels.anew():
        reference = of_arrays(attend, implementation="xla", precision="highest", return_residual=True)
        expected = jax.tree.map(np.asarray, with_gradients(reference)(wide))
    n = None if in_order else len(devices)
    types = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(types,), devices=devices)
    own = ordered(operands, n)
    specs = {name: spec_of(name, array, "x") for name, array in own.items()}
    options = {"implementation": "mosaic", "return_residual": True, "strategy": way, "zigzag": n}
    f = of_arrays(attend, **options)
    if kind == "checked":
        f = jax.shard_map(of_arrays(attend, **options, axis_name="x"), mesh=mesh, in_specs=(specs,), out_specs=P(None, "x"))
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in own.items()}
        in_float32 = with_gradients(lambda operands: jax.tree.map(lambda x: x.astype(jnp.float32), f(operands)))
        results, derivatives = jax.tree.map(np.asarray, jax.jit(in_float32)(placed))
    if n is not None:
        results = [reordered(result, n, 1, is_undone=True) for result in results]
        derivatives = ordered(derivatives, n, is_undone=True)
    for actual, truth in zip(jax.tree.leaves((tuple(results), derivatives)), jax.tree.leaves(expected), strict=True):
        actual, most = np.asarray(actual, np.float32), np.max(np.abs(truth), initial=1, where=np.isfinite(truth))
        np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(truth))
        np.testing.assert_allclose(actual, truth, rtol=2.0**-5, atol=2.0**-5 * most)
