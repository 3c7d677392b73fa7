"""Score and mask functions on Triton's kernels of attention: what they are translated to, what is refused, what compiles.

What the kernels compute is tested in `triton_functions_interpreted.py`, which needs a process of its own.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._triton import attention_launch
from jaxsoftmax._triton.attention_program import ProgramStep, TileProgram
from jaxsoftmax.ops.attention import primitive, triton_functions
from jaxsoftmax.ops.attention import triton as ours
from jaxsoftmax.ops.attention.score_functions import functions_and_operands

from ..support import cases, kernels, triton_kernels
from ..support.attention.lowering import operands, shaped
from ..support.attention.triton_variants import CALLS, check_call, check_variant
from ..support.attention.variants import VARIANTS, Sizes
from ..support.triton_kernels import needs_triton, target_of

forced = functools.partial(jaxsoftmax.dot_product_attention, implementation="triton")
SLOPES, TABLE = jnp.asarray([0.5, 0.25, 0.125, 0.0625]), jnp.ones((4, 599))


@pytest.fixture
def on():
    with triton_kernels.lowering_without() as lower_for:
        yield lower_for


def relative(score, batch, head, query, key):
    return score + TABLE[head, query - key + 299]


def causal(batch, head, query, key):
    return (query >= key) & (head > -1)  # no window, which would run without a function


def gradients(given, table, **options):
    def loss(given, table):
        return jnp.sum(forced(**given, score_mod=lambda s, b, h, q, k: s + table[h, q - k + 299], **options))

    return jax.grad(loss, (0, 1))(given, table)


# The choice.


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_kernels_run_functions_where_mosaics_do_not(on, capability):
    on(capability)
    attend = functools.partial(jaxsoftmax.dot_product_attention, score_mod=relative, mask_mod=causal)
    (decision,) = explain(lambda given: attend(**given), operands(), platform="cuda")
    assert decision.implementation == ("mosaic" if capability == (9, 0) else "triton")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_kernels_run_functions_where_they_are_forced(on, capability):
    on(capability)
    attend = functools.partial(forced, score_mod=relative, mask_mod=causal)
    cases.assert_all_run_on("triton", explain(lambda given: attend(**given), operands(), platform="cuda"))
    decisions = explain(functools.partial(gradients, mask_mod=causal), operands(), TABLE, platform="cuda")
    assert [decision.primitive for decision in decisions] == ["dot_product_attention", "dot_product_attention_vjp"]
    cases.assert_all_run_on("triton", decisions)


REFUSED = {
    "erf": (lambda s, b, h, q, k: jax.lax.erf(s), "kernels have no functions with the operation erf"),
    "a loop": (lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, x: 2 * x, s), "the operation scan"),
    "a sum": (lambda s, b, h, q, k: s + jnp.sum(TABLE[h]), "the operation reduce_sum"),
    "a remainder": (lambda s, b, h, q, k: s % 2.0, "an operation of dtype float32"),
    "many elements": (lambda s, b, h, q, k: s + (2 * TABLE)[h, q], "mul of several elements|an array of several elements"),
    "an accuracy": (lambda s, b, h, q, k: jax.lax.exp(s, accuracy=jax.lax.AccuracyMode.HIGHEST), "an accuracy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_runs_is_refused(on, name):
    on((8, 0))
    score_mod, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=f"implementation='triton' cannot run: .*({words})"):
        explain(lambda given: forced(**given, score_mod=score_mod), operands(), platform="cuda")
    attend = functools.partial(jaxsoftmax.dot_product_attention, score_mod=score_mod)
    cases.assert_all_run_on("xla", explain(lambda given: attend(**given), operands(), platform="cuda"))


def test_wide_numbers_are_refused():
    with jax.enable_x64(True):
        functions, _ = functions_and_operands(
            "f", jnp.float32, lambda s, b, h, q, k: s + q.astype(jnp.int64).astype(jnp.float32), None, (1,)
        )
    assert triton_functions.reason_against(functions, {}, None) == "kernels have no functions with numbers of dtype int64"


def test_tables_that_words_cannot_number_are_refused():
    functions, _ = functions_and_operands("f", jnp.float32, lambda s, b, h, q, k: s + SLOPES[h], None, (4,))
    types = {"table_0": shaped(2**15, 1, 2**16)}
    assert triton_functions.reason_against(functions, types, None) == (
        "kernels have no functions with 2**31 elements of arrays or more"
    )


@pytest.mark.parametrize(("options", "on_gradients"), [({}, "triton"), ({"deterministic_gradients": True}, "xla")])
def test_derivatives_of_tables_are_left_to_the_reference_if_they_must_be_deterministic(on, options, on_gradients):
    on((8, 0))
    forward, backward = explain(functools.partial(gradients, **options), operands(), TABLE, platform="cuda")
    assert (forward.implementation, backward.implementation) == ("triton", on_gradients)


def test_derivatives_of_several_elements_are_left_to_the_reference():
    """Reading a row of a table at once, as `table[h][q]` in a call of its own does, is no load of an element."""

    def read(s, b, h, q, k):
        return s + jnp.where(h > 1, TABLE[h], TABLE[0])[q]

    functions, _ = functions_and_operands("f", jnp.float32, read, None, (4,))
    said = triton_functions.reason_against(functions, {}, ["table_0"])
    assert "reads several elements of an array at once" in str(said)


# Programs and words.


def program(score_mod, heads=4):
    functions, operands = functions_and_operands("f", jnp.float32, score_mod, None, (2, heads))
    return triton_functions.program_of(functions["score_mod"]), operands


def test_equal_functions_have_equal_programs():
    first, second = (program(lambda s, b, h, q, k: s + SLOPES[h] * (q - k).astype(s.dtype))[0] for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert repr(first) == repr(second)
    other, _ = program(lambda s, b, h, q, k: s - SLOPES[h] * (q - k).astype(s.dtype))
    assert repr(other) != repr(first)


def test_names_of_programs_differ_where_their_results_do():
    """Compiled kernels are known by these names."""
    steps = ProgramStep("add", (0, 1)), ProgramStep("add", (0, 5))
    assert repr(TileProgram(steps, (5,))) != repr(TileProgram(steps, (6,)))


def test_numbers_that_compare_as_equal_differ():
    zero, minus_zero, nan = (
        program(lambda s, b, h, q, k, x=x: jnp.where(q > k, s, jnp.float32(x)))[0] for x in (0.0, -0.0, np.nan)
    )
    assert zero != minus_zero
    assert nan == program(lambda s, b, h, q, k: jnp.where(q > k, s, jnp.float32(np.nan)))[0]


def test_equal_steps_are_one():
    one, _ = program(lambda s, b, h, q, k: s * (q - k).astype(s.dtype))
    two, _ = program(lambda s, b, h, q, k: s * (q - k).astype(s.dtype) + s * (q - k).astype(s.dtype))
    assert len(two.steps) == len(one.steps) + 1
    assert two.steps[-1] == ProgramStep("add", (one.results[0], one.results[0]))


@pytest.mark.parametrize(
    ("score_mod", "count"),
    [
        (lambda s, b, h, q, k: s + SLOPES[h], 0),
        (lambda s, b, h, q, k: s + TABLE[h, q] + TABLE[h, k], 0),
        (relative, 1),
        (lambda s, b, h, q, k: s + TABLE[0, q - k] * TABLE[1, q - k], 2),
    ],
)
def test_loads_for_each_score_are_counted(score_mod, count):
    assert program(score_mod)[0].n_tile_loads == count


def test_loads_for_each_score_make_tiles_smaller(on):
    on((8, 0))
    given = operands(size=64)
    functions, tables = functions_and_operands("f", jnp.float32, relative, None, (2, 4))
    params = {"scale": 0.125, "window": (None, None), "soft_cap": None, "dropout_rate": 0.0, "precision": None}
    attention = triton_kernels.operations(primitive)["dot_product_attention"]
    problem = triton_kernels.problem_of(attention, given | tables, **params, **functions)
    assert triton_kernels.Forced(ours).plan(problem, target_of((8, 0))).tiling == attention_launch.AttentionTiling(64, 32, 4, 3)
    wide = triton_kernels.problem_of(attention, given, **params)
    assert ours.plan(wide, target_of((8, 0))).tiling == attention_launch.AttentionTiling(128, 64, 4, 3)


def test_words_hold_every_element():
    tables = {
        "table_0": jnp.asarray([[[1.5, -2.0]]], jnp.bfloat16),
        "table_1": jnp.asarray([[[True, False, True]]]),
        "table_2": jnp.asarray([[[-3]], [[5]]], jnp.int8),
        "table_3": jnp.asarray([[[2**32 - 1]]], jnp.uint32),
        "head_numbers": jnp.arange(2, dtype=jnp.int32)[None],
    }
    assert triton_functions.starts_of(tables) == (
        ("table_0", 0),
        ("table_1", 2),
        ("table_2", 5),
        ("table_3", 7),
        ("head_numbers", 8),
    )
    words = np.asarray(triton_functions.words_of(tables))
    np.testing.assert_array_equal(words[:2].view(np.float32), [1.5, -2.0])
    np.testing.assert_array_equal(words[2:], [1, 0, 1, -3, 5, -1, 0, 1])
    parts = triton_functions.arrays_of(jnp.arange(10.0), tables, ("table_0", "table_2"))
    assert {name: part.shape for name, part in parts.items()} == {"table_0": (1, 1, 2), "table_2": (2, 1, 1)}
    np.testing.assert_array_equal(parts["table_2"].ravel(), [5, 6])


def test_the_spans_of_a_mask_function_and_of_segments_intersect(on):
    on((8, 0))
    ids = jnp.asarray(np.repeat(np.arange(2, dtype=np.int32), 32))[None]
    given = {name: jnp.zeros((1, 64, 1, 16)) for name in ("query", "key", "value")}
    functions, numbers = functions_and_operands("f", jnp.float32, None, causal, (1, 1))
    tiling = attention_launch.AttentionTiling(16, 16, 4, 1)
    given |= numbers
    find = functools.partial(ours._find_spans, "forward", tiling, functions)
    assert find(given)[..., :2].tolist() == [[[0, 1], [0, 2], [0, 3], [0, 4]]]
    with_segments = find(given | {"query_segments": ids, "key_segments": ids})
    assert with_segments[..., :2].tolist() == [[[0, 1], [0, 2], [2, 3], [2, 4]]]


# What compiles, for GPUs that need not be there.

CAPABILITIES = [
    pytest.param(c, marks=[] if c == (9, 0) else pytest.mark.slow) for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
]
COMPILED = [
    pytest.param(
        name, *kind, marks=cases.slow_unless((name, kind) in ((("relative"), (64, "bfloat16")), ("t5", (128, "float16"))))
    )
    for name in ("relative", "t5", "documents", "tree", "gated", "tanh_cap")
    for kind in ((64, "bfloat16"), (128, "float16"), (64, "float32"))
]
# Bytes that a thread may spill. The most is that of documents, forward, on 8.0, whose tensor cores read registers.
SPILLED = {"bfloat16": 512, "float16": 1280, "float32": 1024}


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(("name", "size", "dtype"), COMPILED)
def test_kernels_with_functions_compile_and_fit(monkeypatch, capability, name, size, dtype):
    variant = VARIANTS[name](np.random.default_rng(0), Sizes(2, 300, 300, 4))
    moving = {name: jax.ShapeDtypeStruct(x.shape, jnp.float32) for name, x in variant.moving.items()}
    fixed = {name: jnp.asarray(x) for name, x in variant.arrays.items() if name not in moving}

    def both(given, moving):
        attend = functools.partial(forced, return_residual=True)
        results, pull = jax.vjp(lambda given, moving: attend(**given, **variant.functions(fixed | moving)), given, moving)
        return pull(results)

    with kernels.target(target_of(capability)), kernels.anew():
        lower = jax.jit(both).trace(operands(size=size, dtype=dtype), moving).lower
        found = triton_kernels.compiled(lambda: lower(lowering_platforms=("cuda",)) and None, monkeypatch)
    assert [kernel.name for kernel in found] == [
        f"attention_{name}_triton" for name in ("forward", "backward_keys", "backward_queries")
    ]
    for kernel in found:
        assert kernel.spilled <= SPILLED[dtype], kernel
        assert kernel.shared <= target_of(capability).shared_memory, kernel


@needs_triton
def test_a_program_for_a_gpu_that_is_not_there_holds_the_kernels():
    f = jax.jit(functools.partial(gradients, mask_mod=causal))
    with kernels.target(target_of((8, 0))), kernels.anew():
        exported = jax.export.export(f, platforms=("cuda",), disabled_checks=triton_kernels.UNCHECKED)
        module = exported(operands(), jax.ShapeDtypeStruct(TABLE.shape, TABLE.dtype)).mlir_module()
    assert module.count("custom_call @triton_kernel_call") == 3


# What the kernels compute.


@needs_triton
def test_the_kernels_in_tritons_interpreter():
    triton_kernels.assert_passes_interpreted(Path(__file__).with_name("triton_functions_interpreted.py"))


NATIVE = [(64, "bfloat16"), (128, "float16"), (64, "float32"), (40, "bfloat16")]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "kind"), cases.in_turns(3, VARIANTS, NATIVE))
def test_native_variants_and_their_derivatives(name, kind):
    size, dtype = kind
    check_variant(name, Sizes(2, 300, 333, 4), 2, dtype, size)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("index", "name"), [*enumerate(CALLS)])
def test_native_calls_with_other_arguments(index, name):
    check_call(name, cases.DTYPES[index % 3])
