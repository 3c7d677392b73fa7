"""Log-probabilities and entropies of a linear layer, without its logits, against whole logits in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax.ops.cross_entropy import linear_terms, parts

from ..support import cases, oracle
from ..support.meshes import COLLECTIVE, make_mesh, spec_of

pytestmark = pytest.mark.usefixtures("hollow_kernels")

X64 = pytest.mark.usefixtures("x64")
ROWS, HIDDEN, CLASSES = (3, 70), 16, 333
WRT = ("hidden", "weight", "bias", "temperature")
ALL = {"return_entropy": True, "return_lse": True}


@pytest.fixture
def blocks(monkeypatch):
    """Makes several blocks of classes, the last one smaller, and several parts of rows."""
    monkeypatch.setattr(linear_terms, "LEAST_CLASSES", 128)
    monkeypatch.setattr(parts, "MOST", 128 * CLASSES * 16)
    for most in ("BLOCK", "ONE_BLOCK"):
        monkeypatch.setattr(linear_terms, most, 128 * 128 * 16)


def given(rows=ROWS, n=None, classes=CLASSES, dtype=np.float64, seed=0, hidden=HIDDEN):
    """Makes operands; two tokens of a row are the same class, if it has several."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, classes, rows if n is None else (*rows, n))
    if n:
        tokens[..., -1] = tokens[..., 0]
    return {
        "hidden": rng.standard_normal((*rows, hidden)).astype(dtype),
        "weight": rng.standard_normal((hidden, classes)).astype(dtype),
        "bias": rng.standard_normal(classes).astype(dtype),
        "temperature": rng.uniform(0.5, 2, rows),
        "tokens": tokens,
    }


def by_blocks(arrays, class_axis=-1, **options):
    arrays = dict(arrays)
    hidden, weight, tokens = (arrays.pop(name) for name in ("hidden", "weight", "tokens"))
    weight = weight if class_axis else weight.T
    return jaxsoftmax.linear_log_probs(hidden, weight, tokens, class_axis=class_axis, **arrays, **options)


def whole(arrays, class_axis=-1, **options):
    """Computes the same from all logits."""
    del class_axis
    logits = arrays["hidden"] @ arrays["weight"]
    logits += jnp.broadcast_to(arrays.get("bias", 0.0), logits.shape)
    scale = 1 / arrays["temperature"] if "temperature" in arrays else None
    return jaxsoftmax.log_probs(logits, arrays["tokens"], scale=scale, **options)


def total(found):
    """Computes a function of all results that is not linear in any."""
    return sum(jnp.sum(jnp.sin((at + 1.3) * each)) for at, each in enumerate(jax.tree.leaves(found)))


def split(arrays):
    """Returns the arrays that have derivatives, and the others."""
    return {name: a for name, a in arrays.items() if name in WRT}, {name: a for name, a in arrays.items() if name not in WRT}


def with_gradients(f, arrays, **options):
    wrt, others = split(arrays)

    @jax.jit
    def run(wrt):
        return f(wrt | others, **options), jax.grad(lambda wrt: total(f(wrt | others, **options)))(wrt)

    return run(wrt)


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("class_axis", [-1, 0])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("n", [None, 0, 1, 3])
def test_results_and_gradients_are_those_of_whole_logits(n, cap, class_axis):
    arrays, options = given(n=n), ALL | {"logits_soft_cap": cap, "class_axis": class_axis}
    oracle.assert_same_in_float64(*(with_gradients(f, arrays, **options) for f in (by_blocks, whole)))


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("options", [{}, {"return_entropy": True}, {"return_lse": True}], ids=str)
@pytest.mark.parametrize("without", [("bias",), ("temperature",), ("bias", "temperature")], ids=str)
def test_results_and_operands_that_are_absent(without, options):
    arrays = {name: array for name, array in given().items() if name not in without}
    oracle.assert_same_in_float64(*(with_gradients(f, arrays, **options) for f in (by_blocks, whole)))


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", WRT)
@pytest.mark.parametrize("n", [None, 3])
def test_derivatives_by_one_operand(name, n):
    """Checks both modes, and the gradient's derivative in both modes."""
    arrays = given(rows=(150,), n=n)
    other = np.random.default_rng(1).standard_normal(arrays[name].shape)

    def derivatives(f):
        def of(array):
            return f(arrays | {name: array}, **ALL)

        gradient = jax.grad(lambda array: total(of(array)))
        along = jax.grad(lambda array: jnp.sum(gradient(array) * other))

        @jax.jit
        def run(array):
            return jax.jvp(of, (array,), (other,)), jax.jvp(gradient, (array,), (other,)), along(array)

        return run(arrays[name])

    oracle.assert_same_in_float64(derivatives(by_blocks), derivatives(whole))


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("n", [None, 3])
def test_a_row_of_nan_without_cotangents_leaves_the_gradient_of_a_temperature_finite(n):
    arrays = given(rows=(5,), n=n)
    kept = np.arange(5) != 1

    def loss(temperature, hidden):
        found = by_blocks(arrays | {"hidden": hidden, "temperature": temperature}, **ALL)
        return total([each[kept] for each in found])

    few, hurt = arrays["hidden"].copy(), arrays["hidden"].copy()
    few[1], hurt[1] = 0, np.nan
    found, expected = (jax.jit(jax.grad(loss))(0.7, hidden) for hidden in (hurt, few))
    oracle.assert_same_in_float64(found, expected)


@X64
@pytest.mark.usefixtures("blocks")
def test_rows_that_do_not_take_part_may_hold_anything():
    arrays, where = given(n=2), np.random.default_rng(3).random(ROWS) < 0.6
    few = {name: array[where] if name in ("hidden", "temperature", "tokens") else array for name, array in arrays.items()}
    hurt = {name: np.array(array) for name, array in arrays.items()}
    hurt["hidden"][~where], hurt["tokens"][~where], hurt["temperature"][~where] = np.nan, -5, np.nan
    wrt, tokens = split(hurt)

    @jax.jit
    def run(wrt):
        def loss(wrt):
            log_p, entropy, lse = by_blocks(wrt | tokens, where=where, **ALL)
            return total((log_p[where], entropy[where], lse[where])), (log_p, entropy, lse)

        return jax.grad(loss, has_aux=True)(wrt)

    gradients, (log_p, entropy, lse) = run(wrt)
    for padded, expected in ((log_p, 0), (entropy, 0), (lse, -np.inf)):
        np.testing.assert_array_equal(padded[~where], expected)
    found, expected = with_gradients(whole, few, **ALL)
    oracle.assert_same_in_float64([log_p[where], entropy[where], lse[where]], list(found))
    for name in ("hidden", "temperature"):
        np.testing.assert_array_equal(np.asarray(gradients[name])[~where], 0)
        gradients[name] = gradients[name][where]
    oracle.assert_same_in_float64(gradients, expected)


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("n", [None, 2])
def test_cotangents_of_rows_that_do_not_take_part_may_be_anything(n):
    arrays, where = given(rows=(150,), n=n), np.random.default_rng(3).random(150) < 0.6
    wrt, tokens = split(arrays)

    def pull(f, cotangents):
        return jax.vjp(lambda wrt: f(wrt | tokens, where=where, **ALL), wrt)[1](cotangents)

    cotangents = [np.where(where, 1.5, np.nan + each.T).T for each in whole(arrays, **ALL)]
    zeros = [np.nan_to_num(each) for each in cotangents]
    oracle.assert_same_in_float64(pull(by_blocks, tuple(cotangents)), pull(whole, tuple(zeros)))


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("n", [None, 3])
def test_classes_whose_bias_is_minus_infinity_are_excluded(n):
    """Some tokens are excluded, too, and have the log-probability -inf, which the loss leaves out."""
    arrays = given(rows=(150,), n=n)
    arrays["bias"][:170:2] = -np.inf

    def run(f):
        def loss(wrt):
            results = f(wrt | split(arrays)[1], **ALL)
            return total([jnp.where(each > -jnp.inf, each, 0) for each in results]), results

        (_, results), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(split(arrays)[0])
        assert np.isneginf(results[0]).any()
        return [np.where(np.isneginf(each), -99, each) for each in results], gradients

    found, expected = run(by_blocks), run(whole)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(expected))
    oracle.assert_same_in_float64(found, expected)


def test_a_token_that_is_no_class_gives_nan_and_the_gradient_of_the_log_sum_exp():
    arrays = given(rows=(4,), dtype=np.float32)
    arrays["tokens"][1:3] = -1, CLASSES
    hidden = arrays.pop("hidden")
    log_p, pull = jax.vjp(lambda hidden: by_blocks(arrays | {"hidden": hidden}), hidden)
    np.testing.assert_array_equal(np.isnan(log_p), [False, True, True, False])
    of_lse = jax.grad(lambda hidden: -jnp.sum(by_blocks(arrays | {"hidden": hidden}, return_lse=True)[1][1:3]))(hidden)
    only = np.array([0, 1, 1, 0], np.float32)
    np.testing.assert_allclose(pull(only)[0][1:3], of_lse[1:3], rtol=1e-5, atol=1e-6)


def test_a_temperature_in_an_array_that_is_not_larger_than_0_gives_nan():
    arrays = given(rows=(4,), dtype=np.float32) | {"temperature": jnp.array([1.0, 0.0, -1.0, jnp.nan])}
    log_p, entropy = jax.jit(functools.partial(by_blocks, return_entropy=True))(arrays)
    for found in (log_p, entropy):
        np.testing.assert_array_equal(np.isnan(found), [False, True, True, True])


@pytest.mark.parametrize("temperature", [1e38, np.inf, jnp.inf * jnp.ones(4)])
def test_a_huge_temperature_makes_classes_equal_except_excluded_ones(temperature):
    arrays = given(rows=(4,), dtype=np.float32) | {"temperature": temperature}
    arrays["bias"][:100], arrays["tokens"][:] = -np.inf, 200
    (log_p, entropy, lse), gradients = with_gradients(by_blocks, arrays, **ALL)
    for found, expected in ((log_p, -1), (entropy, 1), (lse, 1)):
        np.testing.assert_allclose(found, expected * np.log(CLASSES - 100), rtol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize("temperature", [1, 0.7])
def test_tokens_of_categorical_have_its_log_probability(temperature):
    arrays = given(dtype=np.float32)
    logits = jnp.matmul(arrays["hidden"], arrays["weight"], precision="highest")
    tokens, log_p = jaxsoftmax.categorical(jax.random.key(0), logits, temperature=temperature, return_log_prob=True)
    with jax.default_matmul_precision("highest"):
        found = jaxsoftmax.linear_log_probs(arrays["hidden"], arrays["weight"], tokens, temperature=temperature)
    np.testing.assert_allclose(found, log_p, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("weight_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("blocks")
def test_results_in_16_bits_have_float32_logits_and_gradients_are_rounded_once(dtype, weight_dtype):
    """Each weight's gradient is a sum over all rows in float32, however many blocks and parts there are."""
    arrays = given(rows=(3000,), hidden=64, dtype=np.float32)
    arrays = {name: jnp.asarray(a, dtype if name in ("hidden", "weight", "bias") else None) for name, a in arrays.items()}
    if weight_dtype:
        arrays["weight"] = arrays["weight"].astype(weight_dtype)
    found, gradients = with_gradients(by_blocks, arrays, **ALL)
    assert {each.dtype for each in found} == {np.dtype(np.float32)}
    assert all(gradient.dtype == arrays[name].dtype for name, gradient in gradients.items())
    with jax.enable_x64(True):
        exact = {name: np.asarray(a, np.float64) if name in WRT else np.asarray(a) for name, a in arrays.items()}
        truth, of_truth = jax.tree.map(np.asarray, with_gradients(whole, exact, **ALL))
    for a, b in zip(found, truth, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=3e-5)
    # The gradient of logits is rounded to the dtype, and so is the result: 0.3 units. Sums in 16 bits have 0.55.
    unit = float(jnp.finfo(dtype).eps)
    for name, gradient in gradients.items():
        difference = np.linalg.norm(np.asarray(gradient, np.float64) - of_truth[name])
        assert difference <= 0.4 * unit * np.linalg.norm(of_truth[name]), name


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("mapped", [("hidden", "tokens", "temperature"), ("weight",), ("tokens",), WRT], ids=str)
def test_under_vmap(mapped):
    """Maps losses, the gradient of each example, and takes one gradient for all examples."""
    arrays = given(rows=(4, 40), n=2)
    stacked = {
        name: a if name in ("hidden", "tokens", "temperature") else jnp.stack([a, 2 * a, a, -a]) for name, a in arrays.items()
    }
    arrays = {
        name: stacked[name] if name in mapped else a[0] if name in ("hidden", "tokens", "temperature") else a
        for name, a in arrays.items()
    }
    wrt, others = split(arrays)
    axes = tuple({name: 0 if name in mapped else None for name in part} for part in (wrt, others))

    def both(f):
        def of_one(wrt, others):
            return f(wrt | others, **ALL)

        def loss(wrt, others):
            return total(of_one(wrt, others))

        @jax.jit
        def run(wrt):
            each = jax.vmap(jax.grad(loss), axes)(wrt, others)
            return (
                jax.vmap(of_one, axes)(wrt, others),
                each,
                jax.grad(lambda wrt: jnp.sum(jax.vmap(loss, axes)(wrt, others)))(wrt),
            )

        return run(wrt)

    oracle.assert_same_in_float64(both(by_blocks), both(whole))


def test_examples_that_share_the_weight_are_rows_of_one_product():
    arrays = given(rows=(4, 40), dtype=np.float32)
    arrays.pop("bias")

    def loss(hidden, weight):
        each = jax.vmap(lambda h, t: jaxsoftmax.linear_log_probs(h, weight, t, return_entropy=True))
        return total(each(hidden, arrays["tokens"]))

    products = re.findall(
        r"= (f32\[[\d,]*\]).*? dot\(", jax.jit(jax.grad(loss, (0, 1))).lower(arrays["hidden"], arrays["weight"]).as_text("hlo")
    )
    assert sorted(products) == sorted([f"f32[160,{CLASSES}]", f"f32[160,{CLASSES}]", "f32[160,16]", f"f32[16,{CLASSES}]"])


def test_the_gradient_by_what_is_not_asked_for_is_no_product():
    arrays = given(rows=(40,), dtype=np.float32)

    def loss(weight):
        return jnp.sum(by_blocks(arrays | {"weight": weight}))

    text = jax.jit(jax.grad(loss)).lower(arrays["weight"]).as_text("hlo")
    assert len(re.findall(r" dot\(", text)) == 3  # logits twice, and the gradient


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_logits_are_never_whole(is_differentiated):
    rows, classes = 16384, 50000
    shapes = {"hidden": (rows, 8), "weight": (8, classes)}
    types = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    tokens = jax.ShapeDtypeStruct((rows,), np.int32)

    def loss(wrt, tokens):
        return total(by_blocks(wrt | {"tokens": tokens}, return_entropy=True))

    compiled = jax.jit(jax.grad(loss) if is_differentiated else loss).lower(types, tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * linear_terms.ONE_BLOCK < rows * classes * 4


@pytest.mark.parametrize("rows", [1, 100, 8192, 32768, 2**20])
@pytest.mark.parametrize("classes", [1, 300, 32000, 50257, 151936])
def test_blocks_are_large_and_have_whole_tiles(rows, classes):
    size = linear_terms._classes_of_block(classes, rows * 6)
    rest = classes % size
    assert size == classes or (size % 128 == 0 and size < classes)
    assert size >= min(classes, linear_terms.LEAST_CLASSES // 2) - 128
    assert rows * size * 6 <= linear_terms.ONE_BLOCK or size <= linear_terms.LEAST_CLASSES
    assert rest % 128 == 0 or rest < 128 * (classes // size + 1)


SHARDED = [(P("data"), P()), (P("data"), P(None, "model")), (P(), P(None, ("data", "model"))), (P(("data", "model")), P())]


@functools.cache
def on_one_device(n):
    return with_gradients(whole, given(rows=(64,), n=n, classes=320), **ALL)


def placed(mesh, of_hidden, of_weight, arrays):
    of_rows = P(*of_hidden[:1])
    specs = {"hidden": of_hidden, "weight": of_weight, "bias": P(*of_weight[1:]), "temperature": of_rows, "tokens": of_rows}
    return {name: jax.device_put(array, jax.NamedSharding(mesh, specs[name])) for name, array in arrays.items()}, specs


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("n", [None, 2])
@pytest.mark.parametrize(("of_hidden", "of_weight"), SHARDED, ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_rows_and_classes(kind, of_hidden, of_weight, n):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        arrays, specs = placed(mesh, of_hidden, of_weight, given(rows=(64,), n=n, classes=320))
        wrt, tokens = split(arrays)
        run = jax.jit(lambda wrt, tokens: with_gradients(by_blocks, wrt | tokens, **ALL)).lower(wrt, tokens).compile()
        gathered = [kind for kind, name in COLLECTIVE.findall(run.as_text()) if name == "all-gather"]
        largest = max(
            [int(size) for kind in gathered for size in re.findall(r"\d+", re.sub(r"\{.*?\}|f64|s64|s32", "", kind))], default=0
        )
        assert largest <= 64, gathered  # neither weights nor logits
        found, gradients = run(wrt, tokens)
        if kind == AxisType.Explicit:
            assert {name: spec_of(g, g.ndim) for name, g in gradients.items()} == {
                name: (*specs[name], *(None,) * (gradients[name].ndim - len(specs[name]))) for name in gradients
            }
    oracle.assert_same_in_float64((found, gradients), on_one_device(n))


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(("n", "is_of_rows"), [(None, True), (2, True), (2, False)])
def test_classes_that_devices_share_in_a_shard_map(n, is_of_rows, check_vma):
    """It shards rows too, or leaves that to explicit axes."""
    mesh, arrays = make_mesh(AxisType.Auto if is_of_rows else AxisType.Explicit), given(rows=(64,), n=n, classes=320)
    of_rows = P("data") if is_of_rows else P()
    specs = dict.fromkeys(arrays, of_rows) | {"weight": P(None, "model"), "bias": P("model")}
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            functools.partial(by_blocks, axis_name="model", **ALL),
            in_specs=(specs,),
            out_specs=(of_rows,) * 3,
            axis_names={"data", "model"} if is_of_rows else {"model"},
            check_vma=check_vma,
        )
        places = {name: jax.NamedSharding(mesh, P("data") if spec == of_rows else spec) for name, spec in specs.items()}
        found = with_gradients(mapped, jax.device_put(arrays, places))
    oracle.assert_same_in_float64(found, on_one_device(n))


@X64
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_do_not_take_part_where_devices_share_classes(kind):
    mesh, where = make_mesh(kind), np.arange(64) % 3 > 0
    one = with_gradients(by_blocks, given(rows=(64,), classes=320), where=where, return_entropy=True)
    with jax.set_mesh(mesh):
        arrays, _ = placed(mesh, P("data"), P(None, "model"), given(rows=(64,), classes=320))
        mask = jax.device_put(where, jax.NamedSharding(mesh, P("data")))
        found = with_gradients(by_blocks, arrays, where=mask, return_entropy=True)
    oracle.assert_same_in_float64(found, one)


@X64
@pytest.mark.parametrize("sizes", ["rows", "rows, classes"])
def test_symbolic_shapes_are_exported(sizes):
    rows, classes = (*export.symbolic_shape(sizes), CLASSES)[:2]
    shapes = {
        "hidden": (rows, HIDDEN),
        "weight": (HIDDEN, classes),
        "bias": (classes,),
        "temperature": (rows,),
        "tokens": (rows,),
    }
    types = {name: jax.ShapeDtypeStruct(shape, np.int64 if name == "tokens" else np.float64) for name, shape in shapes.items()}
    f = functools.partial(with_gradients, by_blocks, **ALL)
    exported = export.export(jax.jit(f), platforms=("cpu", "cuda"))(types)
    some = given(rows=(130,))
    oracle.assert_same_in_float64(exported.call(some), f(some))


def test_empty_rows():
    arrays = given(rows=(0,), dtype=np.float32)
    found, gradients = with_gradients(by_blocks, arrays, **ALL)
    assert [each.shape for each in found] == [(0,)] * 3
    np.testing.assert_array_equal(gradients["weight"], 0)


@pytest.mark.parametrize("n", [None, 2])
def test_without_classes_results_and_gradients_are_those_of_whole_logits(n):
    arrays = given(rows=(4,), n=n, dtype=np.float32)
    arrays |= {"weight": arrays["weight"][:, :0], "bias": arrays["bias"][:0]}
    found, gradients = with_gradients(by_blocks, arrays, **ALL)
    jax.tree.map(
        np.testing.assert_array_equal, (list(found), gradients["hidden"]), (list(whole(arrays, **ALL)), np.zeros((4, HIDDEN)))
    )
    assert np.isnan(found[0]).all()
    assert gradients["weight"].shape == (HIDDEN, 0)


def test_a_temperature_may_be_a_traced_parameter():
    arrays = given(rows=(4,), dtype=np.float32)

    @jax.jit
    def run(temperature):
        return by_blocks(arrays | {"temperature": nnx.Param(temperature)})

    np.testing.assert_array_equal(run(0.7), jax.jit(lambda t: by_blocks(arrays | {"temperature": t}))(0.7))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", {"linear_log_probs", "linear_log_probs_vjp"}), ("float32", {"cross_entropy", "cross_entropy_vjp"})],
)
def test_it_runs_on_kernels_and_is_explained(dtype, expected):
    """Checks that kernels multiply operands of 16 bits, and read the logits of others."""
    names = set(WRT) - {"temperature"}
    wrt = {name: jax.ShapeDtypeStruct(a.shape, dtype) for name, a in given(classes=5000).items() if name in names}
    tokens = jax.ShapeDtypeStruct(ROWS, np.int32)

    def loss(wrt, tokens):
        return total(by_blocks(wrt | {"tokens": tokens}, return_entropy=True))

    explanation = jaxsoftmax.explain(jax.grad(loss), wrt, tokens, platform="cuda")
    runs = [decision for decision in explanation if dtype == "bfloat16" or not decision.primitive.startswith("linear")]
    assert {decision.primitive for decision in runs} == expected
    cases.assert_all_run_on("mosaic", runs)


F = given(dtype=np.float32)
WRONG = {
    "hidden": (F | {"hidden": F["tokens"]}, {}, TypeError, "hidden must be floating, got int"),
    "tokens": (F | {"tokens": F["hidden"]}, {}, TypeError, "tokens must be integers, got float32"),
    "shape of tokens": (
        F | {"tokens": F["tokens"][:, :5]},
        {},
        ValueError,
        r"tokens must have the shape \(3, 70\) of rows, or that and one axis more, got \(3, 5\)",
    ),
    "candidates": (
        F | {"tokens": np.zeros((3, 70, 2, 2), int)},
        {},
        ValueError,
        r"tokens must have the shape \(3, 70\) of rows, or that and one axis more, got \(3, 70, 2, 2\)",
    ),
    "dtypes": (
        F | {"weight": jnp.asarray(F["weight"], jnp.bfloat16)},
        {},
        ValueError,
        "weight must have the dtype of hidden, float32, or a wider one, got bfloat16",
    ),
    "two of 16 bits": (
        F | {"weight": jnp.asarray(F["weight"], jnp.bfloat16), "hidden": jnp.asarray(F["hidden"], jnp.float16)},
        {},
        ValueError,
        "weight must have the dtype of hidden, float16, or a wider one, got bfloat16",
    ),
    "weight": (
        F | {"weight": F["weight"].T},
        {},
        ValueError,
        r"weight must be \[H, classes\] for hidden \[\*rows, H\], got shapes \(333, 16\) and \(3, 70, 16\)",
    ),
    "class_axis": (F, {"class_axis": 2}, ValueError, "class_axis must be -2, -1, 0 or 1, got 2"),
    "bias": (F | {"bias": np.zeros(3)}, {}, ValueError, r"bias must broadcast to shape \(333,\), got \(3,\)"),
    "temperature 0": (
        F | {"temperature": 0},
        {},
        ValueError,
        "temperature must be larger than 0, 1.18e-38 or more in float32, got 0",
    ),
    "temperature -1": (F | {"temperature": np.array([-1.0] * 70)}, {}, ValueError, "temperature must be larger than 0, .* got"),
    "temperature 1e-40": (F | {"temperature": 1e-40}, {}, ValueError, "temperature must be larger than 0, .* got 1e-40"),
    "temperature nan": (F | {"temperature": float("nan")}, {}, ValueError, "temperature must be larger than 0, .* got nan"),
    "temperatures": (
        F | {"temperature": np.ones(3)},
        {},
        ValueError,
        r"temperature must be a scalar, or broadcast to rows of shape \(3, 70\), got shape \(3,\)",
    ),
    "where": (F, {"where": np.ones(3, bool)}, ValueError, r"where must broadcast to shape \(3, 70\), got \(3,\)"),
    "where of numbers": (F, {"where": np.ones(70)}, TypeError, "where must be boolean, got float64"),
    "cap": (F, {"logits_soft_cap": -1}, ValueError, "logits_soft_cap must be positive"),
    "flags": (F, {"return_entropy": 1}, TypeError, "return_entropy must be True or False, got 1"),
    "implementation": (F, {"implementation": "cublas"}, ValueError, "implementation must be None or one of"),
}


@X64
@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_said(kind):
    arrays, options, error, words = WRONG[kind]
    with pytest.raises(error, match=f"linear_log_probs: {words}"):
        by_blocks(arrays, **options)
