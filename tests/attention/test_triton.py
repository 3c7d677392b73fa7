"""Triton's kernels of attention: which calls they are chosen for, for which GPUs they compile, what they compute.

What the kernels compute is tested in `triton_interpreted.py`, which needs a process of its own.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core import target as targets
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._triton import attention_launch
from jaxsoftmax.ops.attention import key_blocks, primitive
from jaxsoftmax.ops.attention import triton as ours

from ..support import cases, kernels, triton_kernels
from ..support.attention import values
from ..support.attention.lowering import EVERYTHING, operands, shaped, with_features
from ..support.triton_kernels import needs_triton, target_of

attend = jaxsoftmax.dot_product_attention
forced = functools.partial(attend, implementation="triton")
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.fixture
def on():
    with triton_kernels.lowering_without() as lower_for:
        yield lower_for


def pulled(f, given, dout):
    return jax.vjp(lambda q, k, v: f(q, k, v), *(given[name] for name in ("query", "key", "value")))[1](dout)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_it_runs_where_it_is_forced(on, capability):
    on(capability)
    given = operands(size=80, value_size=40, dtype="float32")
    dout = shaped(2, 300, 4, 40, dtype="float32")
    cases.assert_all_run_on("triton", explain(lambda given: forced(**given), given, platform="cuda"))
    backward = explain(functools.partial(pulled, forced), given, dout, platform="cuda")
    assert [d.primitive for d in backward] == ["dot_product_attention", "dot_product_attention_vjp"]
    cases.assert_all_run_on("triton", backward)


def test_tangents_run_on_the_reference(on):
    on((8, 0))
    query = shaped(2, 64, 4, 64)
    tangent = explain(lambda q, t: jax.jvp(lambda q: forced(q, q, q), (q,), (t,)), query, query, platform="cuda")
    cases.assert_all_run_on("triton", tangent, without=["dot_product_attention_jvp"])


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)], ids=str)
def test_it_is_chosen_where_it_is_compiled_for(on, capability):
    on(capability)
    (decision,) = explain(lambda given: attend(**given), operands(), platform="cuda")
    assert decision.implementation == "triton"
    assert "but run on 9.0 only" in decision.remark


REFUSALS = {
    "an old GPU": ((7, 5), {}, {}, r"compute capability 8.x or 9.x or 10.x or 12.x, got cuda \(7, 5\)"),
    "precision": (
        (8, 0),
        {"dtype": "float32"},
        {"precision": "highest"},
        "sums of three of TF32, and precision asks for more",
    ),
    "head size": ((8, 0), {"size": 513}, {}, "head size must be at most 512, got 513 in bfloat16"),
    "value size": ((8, 0), {"value_size": 130, "dtype": "float32"}, {}, "value size must be at most 128, got 130 in float32"),
    "no keys": ((8, 0), {"keys": 0}, {}, r"there must be queries and keys, got shapes \(2, 300, 4, 64\) and \(2, 0, 2, 64\)"),
    "length": ((8, 0), {"length": 2**30}, {}, "there must be fewer than 2147418112 rows of scores"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_it_says_why_it_does_not_run(on, kind):
    capability, shapes, options, words = REFUSALS[kind]
    on(capability)
    with pytest.raises(NotImplementedError, match=f"implementation='triton' cannot run: .*{words}"):
        explain(lambda given: forced(**given, **options), operands(**shapes), platform="cuda")


def test_it_says_what_it_does_not_differentiate(on):
    on((8, 0))
    for size, dtype in ((257, "bfloat16"), (129, "float32")):
        query = shaped(2, 64, 4, size, dtype=dtype)
        with pytest.raises(NotImplementedError, match="head size must be at most"):
            explain(jax.grad(lambda q: jnp.sum(forced(q, q, q))), query, platform="cuda")
    query = shaped(2, 64, 4, 64)
    grad = jax.grad(lambda bias, q: jnp.sum(forced(q, q, q, bias, deterministic_gradients=True)))
    cases.assert_all_run_on("triton", explain(grad, shaped(2, 4, 64, 64, dtype="float32"), query, platform="cuda"))
    with pytest.raises(NotImplementedError, match=r"bias that is broadcast, of shape \(1, 4, 64, 64\), is summed in any order"):
        explain(grad, shaped(1, 4, 64, 64, dtype="float32"), query, platform="cuda")


# How work is spread over programs.


EVERY_WIDTH = [
    (kernel, itemsize, (head, value))
    for kernel, itemsize in attention_launch._TILINGS
    for head, value in itertools.product([16, 32, *attention_launch._TILINGS[kernel, itemsize]], repeat=2)
]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_tilings_fit(capability):
    target = target_of(capability)
    for (kernel, itemsize, widths), score_bytes in itertools.product(EVERY_WIDTH, (0, 1, 2, 4, 5)):
        tiling = attention_launch.tiling_for(kernel, itemsize, widths, target, score_bytes)
        assert attention_launch.shared_bytes(kernel, tiling, itemsize, widths, score_bytes) <= target.shared_memory
        assert tiling.stages >= 1
        assert tiling.warps in (4, 8)
        for block in (tiling.block_q, tiling.block_kv):
            assert block >= 16
            assert block & (block - 1) == 0


def problem(name="dot_product_attention", wanted=None, params=(), more=(), **shapes):
    """Returns a problem of attention."""
    given = operands(**shapes)
    given |= dict.fromkeys(() if wanted is None else ("out", "d_out"), given["query"]) | dict(more)
    options = {"scale": 0.125, "window": (None, None), "soft_cap": None, "dropout_rate": 0.0, "precision": None}
    options |= {"deterministic_gradients": False} | ({} if wanted is None else {"wanted": wanted}) | dict(params)
    return triton_kernels.problem_of(OPERATIONS[name], given, **options)


OPERATIONS = triton_kernels.operations(primitive)


def test_plans_say_how_work_is_spread(on):
    on((8, 0))
    plan = ours.plan(problem(), target_of((8, 0)))
    assert plan.tiling == attention_launch.AttentionTiling(128, 64, 4, 3)
    assert plan.describe() == "tiles of 128 queries x 64 keys, 4 warps, 3 stages"
    assert plan.remark == "compiled for compute capability 8.0, but run on 9.0 only"
    narrow = ours.plan(problem(size=200), target_of((8, 6)))
    assert narrow.describe() == "tiles of 64 queries x 32 keys, 4 warps, 2 stages"
    masked = ours.plan(problem(more={"mask": shaped(2, 1, 300, 300, dtype=bool)}), target_of((8, 0)))
    assert masked.describe() == "tiles of 64 queries x 32 keys, 4 warps, 3 stages"


@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        (("query", "key", "value"), ["backward_keys", "backward_queries"]),
        (("value",), ["backward_keys"]),
        (("bias",), ["backward_queries"]),
        (("sinks",), []),
    ],
    ids=cases.ident,
)
def test_plans_of_gradients_have_the_kernels_that_are_needed(on, wanted, kernels):
    on((8, 0))
    more = {"bias": shaped(1, 4, 300, 300), "sinks": shaped(4)}
    plan = ours.plan(problem("dot_product_attention_vjp", wanted, more=more), target_of((8, 0)))
    assert [kernel for kernel, _ in plan.tilings] == kernels
    assert plan.describe().count("tiles of") == len(kernels)


def test_on_hopper_the_refusal_has_a_plan(on):
    on((9, 0))
    refusal = ours.plan(problem(), targets.HOPPER)
    assert refusal.reason == "on Hopper it runs only where it is asked for"
    assert refusal.plan.tiling == attention_launch.AttentionTiling(64, 64, 4, 3)


def test_a_gpu_without_room_for_the_smallest_tile_is_refused(on):
    on((8, 0))
    target = dataclasses.replace(target_of((8, 0)), shared_memory=1024)
    assert ours.plan(problem(), target) == Refusal(
        "its smallest tiles need more than 1024 bytes of shared memory for a program"
    )


def test_what_has_no_kernel_is_left_to_the_reference(on):
    on((8, 0))
    refusal = ours.plan(problem("dot_product_attention_jvp", ()), target_of((8, 0)))
    assert refusal == Refusal("it has no kernel for dot_product_attention_jvp", lacks_kernel=True)


def test_dims_find_every_element():
    batch, sizes = (2, 3), {"N": 4, "K": 2, "T": 5, "S": 7}
    for name, shape in (
        ("query", (2, 3, 5, 4, 8)),
        ("key", (2, 1, 7, 2, 8)),
        ("bias", (1, 3, 4, 5, 7)),
        ("mask", (2, 3, 1, 5, 1)),
        ("lse", (2, 3, 4, 5)),
        ("key_segments", (1, 3, 7)),
        ("spans", (2, 1, 6, 4)),
    ):
        axes = {"query": "TNH", "key": "SKH", "bias": "NTS", "mask": "NTS", "lse": "NT", "key_segments": "S", "spans": "B4"}[
            name
        ]
        found = attention_launch.index_dims(axes, shape, batch, sizes)
        array = np.arange(np.prod(shape)).reshape(shape)
        own = {"query": "TN", "key": "SK", "bias": "NTS", "mask": "NTS", "lse": "NT", "key_segments": "S", "spans": "B"}[name]
        for b, c in np.ndindex(batch):
            for place in np.ndindex(*((sizes | {"B": 6})[letter] for letter in own)):
                at = [i if size > 1 else 0 for i, size in zip((b, c, *place), shape, strict=False)]
                index = [b * 3 + c, 0, 0, 0]
                for letter, i in zip(own, place, strict=True):
                    index["NKTSB".index(letter) // 2 + 1 if letter in "NKT" else 3 if "T" in own else 2] = i
                address = sum(offset(*pair) for pair in zip(index, found, strict=True))
                assert address == array[tuple(at)].flat[0], (name, place)


def offset(index, triples):
    """What `functions.offset` computes."""
    total = 0
    for divisor, size, stride in zip(*[iter(triples)] * 3, strict=True):
        part = index // divisor
        total += (part % size if size else part) * stride
    return total


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("kinds", [["segments"], ["mask"], ["mask", "segments"]], ids=cases.ident)
def test_spans_hold_every_block_with_something_to_see(kinds, by_keys):
    rng = np.random.default_rng(0)
    length, keys, block_q, block_kv = 70, 100, 16, 32
    seen, given = np.ones((2, length, keys), bool), {}
    if "segments" in kinds:
        ids = [np.sort(rng.integers(0, 4, (2, size)), -1).astype(np.int32) for size in (length, keys)]
        given |= dict(zip(("query_segments", "key_segments"), ids, strict=True))
        seen &= ids[0][..., :, None] == ids[1][..., None, :]
    if "mask" in kinds:
        given["mask"] = (np.arange(keys) < np.arange(length)[:, None] + rng.integers(-9, 30, (2, 1, 1)))[:, None]
        seen &= given["mask"][:, 0]
    found = np.asarray(key_blocks.find_spans(given, (length, keys), block_q, block_kv, by_keys=by_keys))
    padded = np.pad(seen, [(0, 0), (0, -length % block_q), (0, -keys % block_kv)])
    some = padded.reshape(2, -1, block_q, padded.shape[2] // block_kv, block_kv).any((2, 4))
    some = np.swapaxes(some, 1, 2) if by_keys else some
    assert found.shape == (*some.shape[:2], 4)
    for own, (low, high, whole_from, whole_to) in zip(some.reshape(-1, some.shape[-1]), found.reshape(-1, 4), strict=True):
        assert not own[:low].any()
        assert not own[max(high, 0) :].any()
        if "mask" in kinds:
            assert whole_to <= whole_from
        else:
            assert own[whole_from:whole_to].all()


# What compiles, for GPUs that need not be there.

EVERY = [pytest.param(c, marks=[] if c in ((8, 0), (9, 0)) else pytest.mark.slow) for c in CAPABILITIES]
SIZES = {"bfloat16": [64, 128, 256, 512], "float32": [64, 128]}
SPILLED = {"bfloat16": 32, "float32": 384}  # bytes that a thread may spill of a causal call
SPILLED_AT_128 = 448  # of keys' derivatives where tensor cores read shared memory: half the threads are faster all the same
SPILLED_AT_256 = 256  # where the sums of keys' derivatives take half of the registers
SPILLED_WITH_A_PART = 1024  # with a last block that is not full
SPILLED_WITH_EVERYTHING = 2048  # with every feature, which have numbers of their own in registers, at head sizes to 128


@needs_triton
@pytest.mark.parametrize("capability", EVERY, ids=str)
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes])
def test_every_configuration_compiles_and_fits(monkeypatch, capability, dtype, size):
    given, options = with_features(["causal"], (size, size), (512, 512), dtype)
    for kernel in compiled(monkeypatch, capability, given, options, backward=size <= 256):
        most = SPILLED_AT_256 if size == 256 else SPILLED[dtype]
        if (
            size == 128
            and dtype == "bfloat16"
            and "keys" in kernel.name
            and capability[0] in attention_launch._READ_SHARED_MEMORY
        ):
            most = SPILLED_AT_128
        assert kernel.spilled <= most, kernel
        assert kernel.shared <= target_of(capability).shared_memory, kernel


@needs_triton
@pytest.mark.parametrize("capability", EVERY, ids=str)
@pytest.mark.parametrize(("dtype", "size"), [("float16", 128), ("float32", 64)])
def test_one_block_that_is_not_full_needs_no_more_registers(monkeypatch, capability, dtype, size):
    given, options = with_features([], (size, size), (300, 300), dtype)
    for kernel in compiled(monkeypatch, capability, given, options):
        assert kernel.spilled <= SPILLED_WITH_A_PART, kernel


@needs_triton
@pytest.mark.parametrize("capability", EVERY, ids=str)
@pytest.mark.parametrize(("dtype", "sizes"), [("float16", (64, 40)), ("bfloat16", (128, 128)), ("float32", (80, 128))])
def test_all_features_compile_and_fit(monkeypatch, capability, dtype, sizes):
    given, options = with_features(EVERYTHING, sizes, (300, 301), dtype)
    for kernel in compiled(monkeypatch, capability, given, options):
        assert kernel.spilled <= SPILLED_WITH_EVERYTHING, kernel
        assert kernel.shared <= target_of(capability).shared_memory, kernel


def compiled(monkeypatch, capability, given, options, backward=True):
    """The kernels of a call, and if asked of its derivatives, for a GPU."""
    found = []
    moving = {name: array for name, array in given.items() if name in ("query", "key", "value", "bias", "sinks")}
    fixed = {name: array for name, array in given.items() if name not in moving}

    def both(moving, fixed):
        bound = functools.partial(forced, **fixed, **options, return_residual=True)
        results, vjp = jax.vjp(lambda moving: bound(**moving), moving)
        return vjp(results) if backward else results

    with kernels.target(target_of(capability)), kernels.anew():
        lower = jax.jit(both).trace(moving, fixed).lower
        found = triton_kernels.compiled(lambda: lower(lowering_platforms=("cuda",)) and None, monkeypatch)
    names = ["forward", *(["backward_keys", "backward_queries"] if backward else [])]
    assert [kernel.name for kernel in found] == [f"attention_{name}_triton" for name in names]
    return found


@needs_triton
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=str)
def test_a_program_for_a_gpu_that_is_not_there_holds_the_kernels(platforms):
    given, dout = operands(), shaped(2, 300, 4, 64)
    f = jax.jit(functools.partial(pulled, attend))
    with kernels.target(target_of((8, 0))), kernels.anew():
        module = jax.export.export(f, platforms=platforms, disabled_checks=triton_kernels.UNCHECKED)(given, dout).mlir_module()
    assert module.count("custom_call @triton_kernel_call") == 3


# What the kernels compute.


@needs_triton
def test_the_kernels_in_tritons_interpreter():
    triton_kernels.assert_passes_interpreted(Path(__file__).with_name("triton_interpreted.py"))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_native_parts_of_keys_go_on_from_those_before(dtype, has_offset):
    given = values.arrays(length=130, keys=231, size=64, value_size=40, dtype=dtype)
    values.check_parts(
        "triton", triton_kernels.Forced(ours), given, soft_cap=5.0, has_offset=has_offset, target=targets.target_for("cuda")
    )
