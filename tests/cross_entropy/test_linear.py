"""Cross-entropy of a linear layer, whose logits are made part by part, against the same with whole logits in float64."""

import functools
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax.ops.cross_entropy import linear_terms, parts

from ..support import cases, kernels, oracle
from ..support.cross_entropy.cases import ALL
from ..support.cross_entropy.linear import CLASSES, HIDDEN, ROWS, WRT, by_parts, given, sharded_over, whole, with_gradients
from ..support.meshes import COLLECTIVE, make_mesh, spec_of

pytestmark = pytest.mark.usefixtures("hollow_kernels")

X64 = pytest.mark.usefixtures("x64")


@X64
@pytest.mark.parametrize("without", cases.quick((), slow=[("bias", "sample_weight")]), ids=str)
@pytest.mark.parametrize(
    ("options", "reduction", "class_axis"),
    [
        pytest.param(options, reduction, axis, marks=cases.slow_unless((i + j + k) % 2 == 0))
        for i, options in enumerate([{}, ALL | {"ignore_index": 5}])
        for j, reduction in enumerate(["mean", "sum", "none"])
        for k, axis in enumerate([-1, 0])
    ],
    ids=cases.ident,
)
@pytest.mark.usefixtures("parts")
def test_losses_and_gradients_are_those_of_whole_logits(options, reduction, class_axis, without):
    arrays = {name: array for name, array in given().items() if name not in without}
    if class_axis == 0:
        arrays["weight"] = arrays["weight"].T
    options = options | {"reduction": reduction, "class_axis": class_axis}
    actual, expected = (with_gradients(f, arrays, **options) for f in (by_parts, whole))
    oracle.assert_same_in_float64(actual, expected)


RESULTS = {"return_lse": True, "return_entropy": True}


@X64
@pytest.mark.parametrize(
    ("labels", "options", "reduction"),
    [
        pytest.param(labels, options, reduction, marks=cases.slow_unless((i + j + k) % 2 == 1))
        for i, labels in enumerate(["classes", "probabilities"])
        for j, options in enumerate([{}, ALL])
        for k, reduction in enumerate(["sum", "none"])
    ],
    ids=cases.ident,
)
@pytest.mark.usefixtures("parts")
def test_temperatures_and_all_results(labels, options, reduction):
    """One backward pass serves the cotangents of the loss, the log-sum-exp and the entropy; some may be 0."""
    arrays = given() | {"temperature": np.linspace(0.5, 2, 70)}
    if labels == "probabilities":  # they need not add up to 1
        arrays["labels"] = np.random.default_rng(1).random((*ROWS, CLASSES))
    arrays["sample_weight"][1, 3:9] = 0  # these rows have no derivative by their weight
    differentiated = {*WRT, *(["labels"] if labels == "probabilities" else [])} - {"sample_weight"}
    wrt = {name: arrays[name] for name in differentiated}

    def both(f, of_loss, of_lse, of_entropy):
        @jax.jit
        def run(wrt):
            results, pull = jax.vjp(lambda wrt: f(arrays | wrt, reduction=reduction, **options, **RESULTS), wrt)
            cotangents = [factor * jnp.cos(each) for factor, each in zip((of_loss, of_lse, of_entropy), results, strict=True)]
            return results, pull(tuple(cotangents))[0]

        return run(wrt)

    for factors in ((1.0, 0.7, 0.3), (1.0, 0.0, 0.0)):
        oracle.assert_same_in_float64(both(by_parts, *factors), both(whole, *factors))


@X64
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_results_that_are_asked_for(reduction):
    arrays = given()
    loss, lse, entropy = by_parts(arrays, reduction=reduction, **RESULTS)
    for flags, expected in (({"return_lse": True}, lse), ({"return_entropy": True}, entropy)):
        oracle.assert_same_in_float64(by_parts(arrays, reduction=reduction, **flags), (loss, expected))
    oracle.assert_same_in_float64(by_parts(arrays, reduction=reduction), loss)


@X64
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_hot_probabilities_are_classes(reduction):
    arrays = given()
    floating = arrays | {"labels": np.eye(CLASSES)[arrays["labels"]]}
    oracle.assert_same_in_float64(*(with_gradients(by_parts, each, reduction=reduction) for each in (floating, arrays)))


@pytest.mark.parametrize(
    ("form", "products"),
    [
        ({}, 3),
        ({"return_lse": True, "return_entropy": True}, 3),
        ({"reduction": "sum"}, 3),
        ({"reduction": "none"}, 4),
        ({"labels": "probabilities"}, 3),
        ({"labels": "probabilities", "reduction": "none"}, 4),
        ({"labels": "probabilities", "reduction": "none", "all": True, "return_lse": True, "return_entropy": True}, 4),
        ({"labels": "probabilities", "all": True, "return_lse": True}, 6),
        ({"all": True, "return_lse": True}, 7),
        ({"frozen": True}, 2),
        ({"reduction": "none", "frozen": True}, 3),
    ],
    ids=str,
)
def test_products_of_each_form(form, products):
    arrays, options = given(rows=(40,), dtype=np.float32), dict(form)
    is_frozen, has_all = options.pop("frozen", False), options.pop("all", False)
    if options.pop("labels", None):
        arrays["labels"] = np.ones((40, CLASSES), np.float32)
    names = ["hidden"] if is_frozen else ["hidden", "weight"]

    def loss(wrt):
        results = by_parts(arrays | wrt, **options)
        of_loss = jax.tree.leaves(results) if has_all else jax.tree.leaves(results)[:1]
        return sum(jnp.sum(jnp.sin(each)) for each in of_loss), results

    text = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower({name: arrays[name] for name in names}).as_text("hlo")
    assert len(re.findall(r" dot\(", text)) == products


@pytest.mark.parametrize("labels", ["classes", "probabilities"])
@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float16"]))
def test_logits_that_are_not_rounded(dtype, labels):
    """The losses are as far from float64 as float32 is, and the gradient of logits is rounded once, for the products."""
    arrays = given(rows=(300,), hidden=64, classes=500, dtype=dtype)
    if labels == "probabilities":
        arrays["labels"] = np.random.default_rng(1).random((300, 500), np.float32) / 250
    wrt = {name: arrays.pop(name) for name in ("hidden", "weight")}
    weights = arrays["sample_weight"]
    options = {"reduction": "sum", "return_lse": True}

    def run(f, wrt, **more):
        return jax.jit(jax.value_and_grad(lambda wrt: f(arrays | wrt, **options, **more), has_aux=True))(wrt)

    with jax.enable_x64(True):
        exact = {name: np.asarray(array, np.float64) for name, array in wrt.items()}
        arrays = {name: np.asarray(array, np.float64) if name == "bias" else array for name, array in arrays.items()}
        (loss, lse), gradients = jax.tree.map(np.asarray, run(whole, exact))
    arrays["sample_weight"] = weights
    error = {}
    for logits_dtype in (None, "float32"):
        (found, found_lse), found_gradients = jax.tree.map(np.asarray, run(by_parts, wrt, logits_dtype=logits_dtype))
        error[logits_dtype] = np.max(np.abs(found_lse - lse)), abs(found - loss) / abs(loss)
        for name, gradient in gradients.items():
            distance = np.linalg.norm(np.float64(found_gradients[name]) - gradient) / np.linalg.norm(gradient)
            assert distance < 2 * float(jnp.finfo(dtype).eps), name
    if dtype == "bfloat16":
        assert max(error["float32"]) < 1e-5 < error[None][0]


@X64
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_that_do_not_count_may_hold_anything(reduction):
    arrays = given()
    few = {name: array[1:] if name in ("hidden", "labels", "sample_weight") else array for name, array in arrays.items()}
    arrays["hidden"][0], arrays["sample_weight"][0, :40], arrays["labels"][0, 40:] = np.nan, 0, -100
    arrays["labels"][0, :40] = 10**6
    options = {"ignore_index": -100, "reduction": reduction, "z_loss": 0.1}
    (loss, gradients), (expected, of_few) = (with_gradients(by_parts, given, **options) for given in (arrays, few))
    if reduction == "none":
        np.testing.assert_array_equal(loss[0], 0)
        loss = loss[1:]
    for name in ("hidden", "sample_weight"):
        np.testing.assert_array_equal(gradients[name][0] if name == "hidden" else 0, 0)
        gradients[name] = gradients[name][1:]
    oracle.assert_same_in_float64((loss, gradients), (expected, of_few))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_nothing_counts_the_loss_is_0(reduction):
    arrays = given(dtype=np.float32) | {"labels": np.full(ROWS, 7)}
    loss, gradients = with_gradients(by_parts, arrays, ignore_index=7, reduction=reduction)
    assert loss == 0
    jax.tree.map(lambda gradient: np.testing.assert_array_equal(gradient, 0), gradients)


def test_a_label_that_is_no_class_gives_nan():
    arrays, both = given(dtype=np.float32), jax.jit(lambda arrays: (by_parts(arrays), by_parts(arrays, reduction="none")))
    for label in (-1, CLASSES):
        arrays["labels"][1, 2] = label
        mean, losses = both(arrays)
        assert np.isnan(mean), label
        assert np.flatnonzero(np.isnan(losses)).tolist() == [72], label


@pytest.mark.parametrize(
    ("weight_dtype", "dtype"),
    [
        ("float32", "bfloat16"),
        (None, "float16"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("float32", "float16"), (None, "bfloat16")]),
    ],
)
@pytest.mark.usefixtures("parts")
def test_errors_are_no_larger_than_those_of_whole_logits_of_that_dtype(dtype, weight_dtype):
    """Those have float32 products, and logits and their gradient rounded once."""
    arrays = given(rows=(300,), hidden=64, classes=500, dtype=dtype)
    arrays.pop("sample_weight")

    def rounded(arrays):
        wide = {name: array.astype(np.float32) for name, array in arrays.items() if name != "labels"}
        logits = (wide["hidden"] @ wide["weight"] + wide["bias"][None]).astype(jnp.dtype(dtype))
        loss, of_logit = jax.value_and_grad(lambda x: jnp.mean(jaxsoftmax.cross_entropy(x, arrays["labels"])))(logits)
        of_logit = of_logit.astype(np.float32)
        gradients = {"hidden": of_logit @ wide["weight"].T, "weight": wide["hidden"].T @ of_logit, "bias": of_logit.sum(0)}
        return loss, {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items()}

    given_here = arrays | ({"weight": arrays["weight"].astype(weight_dtype)} if weight_dtype else {})
    labels = arrays["labels"]
    wrt = {name: array for name, array in given_here.items() if name != "labels"}
    actual = jax.jit(jax.value_and_grad(lambda wrt: by_parts(wrt | {"labels": labels})))(wrt)
    assert actual[1]["weight"].dtype == given_here["weight"].dtype
    with jax.enable_x64(True):
        exact = {name: np.asarray(array, np.float64) for name, array in wrt.items()}
        truth = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(lambda wrt: whole(wrt | {"labels": labels})))(exact))

    def error(found, true):
        return float(np.max(np.abs(np.asarray(found, np.float64) - true)) / np.max(np.abs(true)))

    # A few more roundings to the dtype: sums over parts, of which there are three here.
    few = jax.tree.map(lambda true: 4 * float(jnp.finfo(dtype).eps), truth)
    jax.tree.map(
        lambda found, beside, true, more: np.testing.assert_array_less(error(found, true), error(beside, true) + more),
        actual,
        jax.jit(rounded)(arrays),
        truth,
        few,
    )


@X64
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transformations(reduction):
    arrays = given()
    labels, wrt = arrays.pop("labels"), arrays

    def gradients(f):
        return jax.grad(lambda wrt: jnp.sum(jnp.sin(f(wrt | {"labels": labels}, reduction=reduction))))

    def scanned(f):
        def body(wrt, factor):
            found = f(wrt)
            return jax.tree.map(lambda a, g: a - 0.1 * factor * g, wrt, found), None

        return lambda wrt: jax.lax.scan(body, wrt, np.arange(2.0))[0]

    steps = {
        "vmap": lambda f: lambda wrt: jax.vmap(f)(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), wrt)),
        "scan": scanned,
        "checkpoint": jax.checkpoint,
    }
    both = jax.jit(lambda wrt: {name: [step(gradients(f))(wrt) for f in (by_parts, whole)] for name, step in steps.items()})
    for actual, expected in both(wrt).values():
        oracle.assert_same_in_float64(actual, expected)


@X64
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    ("options", "reduction"),
    [
        pytest.param(options, reduction, marks=cases.slow_unless(i == j))
        for i, options in enumerate([{}, ALL | {"return_lse": True, "return_entropy": True}])
        for j, reduction in enumerate(["mean", "none"])
    ],
    ids=cases.ident,
)
def test_forward_mode_and_second_derivatives(options, reduction):
    arrays = given()
    labels, temperature = arrays.pop("labels"), np.linspace(0.5, 2, 70)
    wrt = arrays | {"temperature": temperature}

    def both(f):
        def total(wrt):
            results = f(wrt | {"labels": labels}, reduction=reduction, **options)
            return sum(jnp.sum(jnp.sin(each)) for each in jax.tree.leaves(results))

        @jax.jit
        def run(wrt):
            tangents, gradient = jax.tree.map(jnp.cos, wrt), jax.grad(total)
            twice = jax.grad(
                lambda wrt: sum(jnp.vdot(*pair) for pair in zip(*map(jax.tree.leaves, (gradient(wrt), tangents)), strict=True))
            )
            return jax.jvp(total, (wrt,), (tangents,)), jax.jvp(gradient, (wrt,), (tangents,))[1], twice(wrt)

        return run(wrt)

    oracle.assert_same_in_float64(both(by_parts), both(whole))


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_logits_are_never_whole(is_differentiated):
    rows = 16384
    arrays = given(rows=(1,), hidden=8, classes=50000, dtype=np.float32)
    shapes = {name: jax.ShapeDtypeStruct(array.shape, np.float32) for name, array in arrays.items()}
    shapes |= {
        "hidden": jax.ShapeDtypeStruct((rows, 8), np.float32),
        "sample_weight": jax.ShapeDtypeStruct((rows,), np.float32),
    }
    shapes["labels"] = jax.ShapeDtypeStruct((rows,), np.int32)
    f = by_parts

    def run(arrays):
        labels = arrays.pop("labels")
        if not is_differentiated:
            return f(arrays | {"labels": labels})
        return jax.grad(lambda wrt: f(wrt | {"labels": labels}))(arrays)

    compiled = jax.jit(run).lower(shapes).compile()
    logits = rows * 50000 * 4
    most = 4 * parts.MOST_WITH_GRADIENT if is_differentiated else 3 * parts.MOST
    assert compiled.memory_analysis().temp_size_in_bytes < most < logits


def gathered_by(compiled):
    """The shapes of what all-gathers of a program give."""
    found = [kind for kind, name in COLLECTIVE.findall(compiled.as_text()) if name == "all-gather"]
    return [[int(size) for size in re.search(r"\[([\d,]*)\]", kind)[1].split(",")] for kind in found]


@functools.cache
def whole_with_gradients(rows, class_axis=-1, **options):
    """Losses and gradients on one device, the same however arrays are sharded."""
    arrays = given(rows=rows, classes=64)
    arrays["weight"] = arrays["weight"] if class_axis else arrays["weight"].T
    return with_gradients(whole, arrays, class_axis=class_axis, **options)


# On explicit axes those that do not shard classes are also in the next test.
OVER_MESHES = [(P("data"), P()), (P(("data", "model")), P()), (P("data"), P(None, "model")), (P(), P(None, "model"))]


@X64
@pytest.mark.parametrize(
    ("kind", "of_hidden", "of_weight"),
    [
        pytest.param(kind, *specs, marks=cases.slow_unless(kind == AxisType.Auto or specs[1] != P()))
        for kind in (AxisType.Auto, AxisType.Explicit)
        for specs in OVER_MESHES
    ],
    ids=str,
)
@pytest.mark.usefixtures("parts")
def test_sharded_rows_and_classes(kind, of_hidden, of_weight):
    mesh = make_mesh(kind)
    arrays = given(rows=(1024,), classes=64)
    with jax.set_mesh(mesh):
        sharded, _ = sharded_over(mesh, of_hidden, of_weight, arrays)
        compiled = jax.jit(functools.partial(with_gradients, by_parts)).lower(sharded).compile()
        assert {sizes[0] for sizes in gathered_by(compiled)} <= {3}  # three numbers of each row
        actual = compiled(sharded)
    oracle.assert_same_in_float64(actual, whole_with_gradients((1024,)))


@X64
@pytest.mark.parametrize(
    ("of_hidden", "of_weight", "reduction", "class_axis"),
    [
        pytest.param(*specs, reduction, axis, marks=cases.slow_unless((i + j) % 2 == 0 and (j + k) % 2 == 0))
        for i, specs in enumerate(
            [
                (P("data", "model"), P()),
                (P("data", None), P(None, "model")),
                (P("data", None), P("data", "model")),
                (P("data", None, "model"), P("model", "data")),
            ]
        )
        for j, reduction in enumerate(["mean", "none", "sum"])
        for k, axis in enumerate([-1, 0])
    ],
    ids=str,
)
@pytest.mark.usefixtures("parts")
def test_gradients_on_explicit_axes_are_sharded_as_what_they_are_of(of_hidden, of_weight, reduction, class_axis):
    mesh, arrays = make_mesh(AxisType.Explicit), given(rows=(4, 256), classes=64)
    options = {"reduction": reduction, "ignore_index": 5, "class_axis": class_axis}
    with jax.set_mesh(mesh):
        sharded, specs = sharded_over(mesh, of_hidden, of_weight, arrays)
        if class_axis == 0:
            sharded["weight"], specs["weight"] = sharded["weight"].T, P(*of_weight[::-1])
        loss, gradients = jax.jit(lambda arrays: with_gradients(by_parts, arrays, **options))(sharded)
        assert spec_of(loss, loss.ndim) == tuple(of_hidden[: loss.ndim])
        for name, gradient in gradients.items():
            assert spec_of(gradient, gradient.ndim) == (*specs[name], *(None,) * (gradient.ndim - len(specs[name])))
    oracle.assert_same_in_float64((loss, gradients), whole_with_gradients((4, 256), **options))


@X64
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("parts")
def test_on_explicit_axes_a_part_merges_states_once_and_gradients_add_up_once(reduction):
    mesh, arrays = make_mesh(AxisType.Explicit), given(rows=(1024,), classes=64)
    arrays.pop("sample_weight"), arrays.pop("bias")

    def collectives(f):
        """Those of a part, in the loop, and those of all."""
        body, entry = jax.jit(f).lower(sharded).compile().as_text().split("\nENTRY ")
        return [[(re.sub("{.*", "", kind), name) for kind, name in COLLECTIVE.findall(text)] for text in (body, entry)]

    def loss(arrays):
        return jnp.sum(by_parts(arrays, reduction=reduction))

    with kernels.plugged_in_local("cross_entropy"), jax.set_mesh(mesh):
        sharded, _ = sharded_over(mesh, P("data"), P(None, "model"), arrays)
        forward, backward = collectives(loss), collectives(jax.grad(loss, allow_int=True))
    of_states, of_all_states = ("f64[3,2,128,1]", "all-gather"), ("f64[3,2,256]", "all-gather")
    of_weight, of_hidden = ("f64[16,32]", "all-reduce"), ("f64[256,16]", "all-reduce")
    of_sum, of_losses = ("f64[]", "all-reduce"), [("f64[256]", "all-reduce")] * (reduction == "none")
    of_count = [of_sum] * (reduction == "mean")
    assert forward == [[], [*of_count, of_all_states, *of_losses, of_sum]]
    if reduction == "mean":
        assert backward == [[of_states], [*of_count, of_weight, of_hidden]]
    else:
        of_cotangents = ("f64[256,1]", "all-reduce")
        assert backward == [[], [of_cotangents, of_all_states, of_hidden, of_weight]]


@X64
def test_inside_shard_map():
    mesh = make_mesh(AxisType.Auto, (8,), ("data",))
    arrays = given(rows=(64,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=(P(), P()))
    def step(hidden, weight, labels):
        weight = jax.lax.pcast(weight, "data", to="varying")

        def loss(weight):
            return jaxsoftmax.linear_cross_entropy(hidden, weight, labels, reduction="sum")

        return jax.lax.psum(jax.value_and_grad(loss)(weight), "data")

    actual = step(arrays["hidden"], arrays["weight"], arrays["labels"])
    few = {name: arrays[name] for name in ("hidden", "weight", "labels")}
    expected = jax.value_and_grad(lambda weight: whole(few | {"weight": weight}, reduction="sum"))(few["weight"])
    oracle.assert_same_in_float64(actual, expected)


@X64
@pytest.mark.parametrize("sizes", ["rows", "rows, classes"])
@pytest.mark.parametrize(
    "options", cases.every_other([{}, ALL | {"ignore_index": 5, "reduction": "none"}, ALL], 1), ids=["plain", "none", "all"]
)
def test_symbolic_shapes_are_exported(options, sizes):
    rows, classes = (*export.symbolic_shape(sizes), CLASSES)[:2]
    shapes = {name: array.shape for name, array in given().items()}
    for name in ("hidden", "labels", "sample_weight"):
        shapes[name] = (rows, *shapes[name][1:])
    shapes |= {"weight": (HIDDEN, classes), "bias": (classes,)}
    types = {name: jax.ShapeDtypeStruct(shape, np.int64 if name == "labels" else np.float64) for name, shape in shapes.items()}
    f = functools.partial(with_gradients, by_parts, **options)
    exported = export.export(jax.jit(f), platforms=("cpu", "cuda"))(types)
    for some in (given(), given(rows=(8, 70))):
        oracle.assert_same_in_float64(exported.call(some), f(some))


def test_explained():
    arrays = {name: jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for name, array in given(classes=5000).items()}
    arrays.pop("labels")
    labels = jax.ShapeDtypeStruct(ROWS, jnp.int32)

    def loss(wrt, labels):
        return by_parts(wrt | {"labels": labels})

    explanation = jaxsoftmax.explain(jax.grad(loss), arrays, labels, platform="cuda")
    assert {d.primitive for d in explanation} == {"linear_cross_entropy_gradient"}
    cases.assert_all_run_on("mosaic", explanation)


@pytest.mark.parametrize("is_mapped", [True, False], ids=["shard_map", "explicit"])
def test_kernels_run_on_shards_of_rows(is_mapped):
    mesh = make_mesh(AxisType.Explicit)
    shapes = (8, 70, HIDDEN), (HIDDEN, 5000), (8, 70)
    dtypes, specs = (jnp.bfloat16, jnp.bfloat16, np.int32), (P("data"), P(), P("data"))
    gradient = jax.grad(jaxsoftmax.linear_cross_entropy)
    with jax.set_mesh(mesh):
        if is_mapped:
            gradient = jax.shard_map(gradient, in_specs=specs, out_specs=P("data"))
        given = [
            jax.ShapeDtypeStruct(*kind, sharding=NamedSharding(mesh, spec))
            for *kind, spec in zip(shapes, dtypes, specs, strict=True)
        ]
        explanation = jaxsoftmax.explain(gradient, *given, platform="cuda")
    cases.assert_all_run_on("mosaic", explanation)
    assert [(d.primitive, d.operands[0]) for d in explanation] == [("linear_cross_entropy_gradient", "bfloat16[140,16]")]


def test_gradients_in_float16_keep_what_a_loss_scale_keeps():
    arrays = given(rows=(2048,), classes=4096, dtype=np.float16)
    few = {name: arrays[name] for name in ("hidden", "weight", "labels")}

    def gradient(f, arrays):
        return jax.jit(jax.grad(lambda w: 2.0**13 * f(arrays | {"weight": w}).astype(jnp.float32)))(arrays["weight"])

    wide = {name: array.astype(np.float32) if name != "labels" else array for name, array in few.items()}
    expected, actual = (np.asarray(gradient(*given), np.float64) for given in ((whole, wide), (by_parts, few)))
    assert np.linalg.norm(actual - expected) <= 4 * float(jnp.finfo(jnp.float16).eps) * np.linalg.norm(expected)


def test_few_rows_are_no_more_in_parts():
    assert parts.sizes(8, 2**24, 1) == (8, 1)


@hypothesis.given(rows=st.integers(0, 2**20), least=st.integers(0, 2**12))
def test_parts_have_all_rows_and_few_more(rows, least):
    each, count = parts.sizes(rows, least, max(rows, 1))
    assert each * (count - 1) < max(rows, 1)
    assert rows <= each * count
    assert count == 1 or each <= 128 * math.ceil(math.ceil(rows / 128) / least)


F = given(dtype=np.float32)
WRONG = {
    "hidden": (F | {"hidden": F["labels"]}, {}, TypeError, "hidden must be floating, got int64"),
    "float8": (
        F | {"hidden": F["hidden"].astype("float8_e5m2")},
        {},
        TypeError,
        "hidden must have 16 bits or more, .* got float8_e5m2",
    ),
    "labels": (F | {"labels": F["labels"] > 3}, {}, TypeError, "labels must be integers or floating, got bool"),
    "floating labels": (
        F | {"labels": F["sample_weight"]},
        {},
        ValueError,
        r"labels must broadcast to shape \(3, 70, 33\), got \(3, 70\)",
    ),
    "ignored with floating labels": (
        F | {"labels": np.ones(CLASSES)},
        {"ignore_index": 1},
        ValueError,
        "ignore_index must be None where labels are floating, got 1",
    ),
    "temperature": (F, {"temperature": 0.0}, ValueError, "temperature must be larger than 0, .* got 0.0"),
    "logits_dtype": (F, {"logits_dtype": "bfloat16"}, ValueError, "logits_dtype must be float32 for this hidden, got bfloat16"),
    "logits_dtype, no dtype": (F, {"logits_dtype": 3}, ValueError, "logits_dtype must be float32 for this hidden, got 3"),
    "return_lse": (F, {"return_lse": 2}, TypeError, "return_lse must be True or False, got 2"),
    "weight": (
        F | {"weight": F["weight"].T},
        {},
        ValueError,
        r"weight must be \[H, classes\] for hidden \[\*rows, H\], got shapes \(33, 16\) and \(3, 70, 16\)",
    ),
    "class_axis": (F, {"class_axis": 2}, ValueError, "class_axis must be -2, -1, 0 or 1, got 2"),
    "bias": (F | {"bias": np.zeros(3)}, {}, ValueError, r"bias must broadcast to shape \(33,\), got \(3,\)"),
    "sample_weight": (
        F | {"sample_weight": np.zeros(3)},
        {},
        ValueError,
        r"sample_weight must broadcast to shape \(3, 70\), got \(3,\)",
    ),
    "reduction": (F, {"reduction": "avg"}, ValueError, "reduction must be 'mean', 'sum' or 'none', got 'avg'"),
    "smoothing": (F, {"label_smoothing": -1}, ValueError, r"label_smoothing must be from 0 to 1, got -1\.0"),
    "z_loss": (F, {"z_loss": -1}, ValueError, r"z_loss must be 0 or more and finite in float32, got -1\.0"),
    "cap": (F, {"logits_soft_cap": -1}, ValueError, "logits_soft_cap must be positive"),
    "ignored": (F, {"ignore_index": 0.5}, TypeError, "ignore_index must be a concrete integer or None"),
    "implementation": (F, {"implementation": "cublas"}, ValueError, "implementation must be None or one of"),
}


@X64
@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_said(kind):
    arrays, options, error, words = WRONG[kind]
    with pytest.raises(error, match=f"linear_cross_entropy: {words}"):
        by_parts(arrays, **options)


@pytest.mark.parametrize("flag", ["return_lse", "return_entropy"])
@pytest.mark.parametrize("kind", [np.bool_, jnp.asarray], ids=["numpy", "jax"])
def test_flags_may_be_arrays(flag, kind):
    arrays = given(dtype=np.float32)
    found, expected = (by_parts(arrays, **{flag: value}) for value in (kind(True), True))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("wrt", [("hidden",), ("hidden", "weight", "bias")], ids=str)
def test_examples_that_share_a_weight_do_not_copy_it(wrt):
    arrays = given(rows=(8, 64), hidden=64, classes=4096, dtype=np.float32)
    arrays.pop("sample_weight")
    labels, moving = arrays.pop("labels"), {name: arrays[name] for name in wrt}
    axes = {name: 0 if name == "hidden" else None for name in arrays}

    def gradients(moving, labels):
        return jax.grad(lambda moving: by_parts(arrays | moving | {"labels": labels}))(moving)

    mapped = jax.jit(jax.vmap(gradients, ({name: axes[name] for name in wrt}, 0)))
    compiled = mapped.lower(moving, labels).compile()
    logits = 8 * 64 * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 2.5 * logits  # 8 weights have the size of the logits too
    found = mapped(moving, labels)
    for i in (0, 7):
        one = gradients(moving | {"hidden": moving["hidden"][i]}, labels[i])
        for name in wrt:
            np.testing.assert_allclose(found[name][i], one[name], rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.usefixtures("parts", "x64")
def test_second_derivatives_of_parts_that_are_filled_up(reduction, monkeypatch):
    """Rows that fill up the last part leave the gradient of the weight alone, also where a bias excludes a class."""
    monkeypatch.setattr(linear_terms, "ONE_BLOCK", 128 * CLASSES * 8)
    arrays = given(rows=(210,))
    arrays["bias"][5] = -np.inf
    arrays["labels"][arrays["labels"] == 5] = 6
    arrays |= {"temperature": np.linspace(0.5, 2, 210)}
    labels, bias, sample_weight = (arrays.pop(name) for name in ("labels", "bias", "sample_weight"))

    def squares(f):
        def total(wrt):
            more = {"labels": labels, "bias": bias, "sample_weight": sample_weight}
            return jnp.sum(jnp.sin(f(wrt | more, reduction=reduction)))

        return jax.jit(jax.grad(lambda wrt: sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(total)(wrt)))))

    found, expected = squares(by_parts)(arrays), squares(whole)(arrays)
    oracle.assert_same_in_float64(found, expected)


def test_labels_that_examples_share_are_not_written_out_for_each(monkeypatch):
    monkeypatch.setattr(parts, "MOST", 2**20)
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 2**20)
    examples, rows, units, classes = 8, 512, 16, 4096

    def loss(hidden, weight, labels):
        of_example = functools.partial(jaxsoftmax.linear_cross_entropy, weight=weight, labels=labels, reduction="none")
        return jnp.mean(jax.vmap(of_example)(hidden))

    shapes = (examples, rows, units), (units, classes), (rows, classes)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < examples * rows * classes * 4
