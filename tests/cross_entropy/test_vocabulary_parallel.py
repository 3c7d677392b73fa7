"""Classes that devices share: in a `shard_map`, and on automatic and explicit meshes, against one device in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax.ops.cross_entropy import across_devices

from ..support import cases, kernels, oracle
from ..support.cross_entropy.cases import ALL
from ..support.cross_entropy.linear import by_parts, given, sharded_over, whole, with_gradients
from ..support.meshes import collectives_of, make_mesh

pytestmark = pytest.mark.usefixtures("hollow_kernels", "x64")

ROWS, CLASSES = 8, 64
CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
# Over which mesh axes rows and classes are sharded.
SPECS = [(None, "model"), ("data", "model"), ("model", "data"), (None, ("data", "model")), (None, ("model", "data"))]
EVERYTHING = ALL | {"ignore_index": 5, "return_lse": True}


def logits_and_labels():
    """Rows whose parts have nothing but -inf, or are far below the others; labels of all parts, ignored ones, and no class."""
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((ROWS, CLASSES)), np.array([0, 63, 5, 31, 32, 40, 17, 8])
    x[0, 8:32], x[1, :48] = -np.inf, x[1, :48] - 1000
    return x, labels


def names_of(classes):
    return classes if isinstance(classes, tuple) else (classes,)


def mapped(f, in_specs, out_specs, check_vma):
    return jax.jit(jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def total(found):
    """A function of losses, and of a log-sum-exp if there is one, that is not linear."""
    return sum(jnp.sum(jnp.sin(part)) for part in jax.tree.leaves(found))


@pytest.mark.parametrize(
    ("specs", "axis", "options", "check_vma"),
    [
        pytest.param(*case, marks=cases.slow_unless((i + 2 * (case[1] + 1) + 3 * j) % 7 == 0 and case[-1] == (i % 2 == 0)))
        for i, specs in enumerate(SPECS)
        for axis in (-1, 0)
        for j, options in enumerate([{}, EVERYTHING, {"where": "classes", **EVERYTHING}, {"where": "rows"}])
        for case in [(specs, axis, options, True), (specs, axis, options, False)]
    ],
)
def test_losses_in_a_shard_map(specs, axis, options, check_vma):
    rows, classes = specs
    x, labels = logits_and_labels()
    if "label_smoothing" in options:
        x = np.maximum(x, -50)  # the mean of -inf has no derivative
    place = (classes, rows) if axis == 0 else (rows, classes)
    where = np.random.default_rng(1).random(x.shape) < 0.8
    where[np.arange(ROWS), labels], where[6] = True, False
    where = {"classes": where if axis else where.T, "rows": where[:, 0], None: None}[options.get("where")]
    of_where = {"classes": P(*place), "rows": P(rows), None: P()}[options.get("where")]
    named = {name: value for name, value in options.items() if name != "where"}
    x = x if axis else x.T
    t = np.random.default_rng(2).standard_normal(x.shape)

    def losses(x, labels, where, **more):
        return jaxsoftmax.cross_entropy(x, labels, axis=axis, where=where, **named, **more)

    parallel = functools.partial(losses, axis_name=classes)
    out_specs = (P(rows),) * 2 if named.get("return_lse") else P(rows)
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        f = mapped(parallel, (P(*place), P(rows), of_where), out_specs, check_vma)
        inner = jax.grad(lambda x, labels, where: total(parallel(x, labels, where)))
        inner = mapped(inner, (P(*place), P(rows), of_where), P(*place), check_vma)

        def derived(f, x, labels, where, t):
            """Losses, their tangent, and the derivative of a function of them."""
            found, tangent = jax.jvp(lambda x: f(x, labels, where), (x,), (t,))
            return found, tangent, jax.grad(lambda x: total(f(x, labels, where)))(x)

        # The derivative outside, one inside of a function whose gradient a device makes of its part, and a tangent.
        run = jax.jit(lambda *given: (f(*given[:3]), derived(f, *given)[1:], inner(*given[:3])))
        found, (tangent, outside), inside = run(x, labels, where, t)
    expected, of_tangent, gradient = jax.jit(functools.partial(derived, losses))(x, labels, where, t)
    oracle.assert_same_in_float64(found, expected)
    oracle.assert_same_in_float64(outside, gradient)
    devices = 1.0 if check_vma else float(np.prod([make_mesh(AxisType.Auto).shape[name] for name in names_of(classes)]))
    oracle.assert_same_in_float64(inside, devices * gradient)  # unchecked, it is that of the sum over devices
    oracle.assert_same_in_float64(tangent, of_tangent)


def with_gradient_of(f, x, labels, where):
    """Losses, and the derivatives of a function of them with respect to logits and labels, in one program."""
    both = jax.jit(lambda *xs: (f(*xs), jax.grad(lambda *of: total(f(*of, xs[2])), (0, 1))(*xs[:2])))
    return both(x, labels, where)


@CHECKS
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 0.1, "logits_soft_cap": 3.0}], ids=["plain", "all"])
def test_labels_that_are_probabilities(options, check_vma):
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((ROWS, CLASSES)), jax.nn.softmax(rng.standard_normal((ROWS, CLASSES)))
    where = rng.random((ROWS, CLASSES)) < 0.8

    def losses(x, labels, where, **more):
        return jaxsoftmax.cross_entropy(x, labels, where=where, **options, **more)

    with jax.set_mesh(make_mesh(AxisType.Auto)):
        spec = P("data", "model")
        f = mapped(functools.partial(losses, axis_name="model"), (spec,) * 3, P("data"), check_vma)
        actual = with_gradient_of(f, x, labels, where)
    expected = with_gradient_of(losses, x, labels, where)
    oracle.assert_same_in_float64(actual, expected)


def test_a_label_that_no_device_has_gives_nan():
    x, labels = logits_and_labels()
    labels[:3] = -1, CLASSES, 2**31 - 1
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        f = functools.partial(jaxsoftmax.cross_entropy, axis_name="model")
        loss = mapped(f, (P("data", "model"), P("data")), P("data"), True)(x, labels)
        hidden, weight = np.ones((ROWS, 4)), np.ones((4, CLASSES))
        f = functools.partial(jaxsoftmax.linear_cross_entropy, reduction="none", axis_name="model")
        linear = mapped(f, (P("data"), P(None, "model"), P("data")), P("data"), True)(hidden, weight, labels)
    for found in (loss, linear):
        np.testing.assert_array_equal(np.isnan(found), [True] * 3 + [False] * 5)


@CHECKS
def test_the_tangent_of_a_state_is_that_of_the_log_sum_exp(check_vma):
    x, labels = logits_and_labels()
    t = np.random.default_rng(1).standard_normal(x.shape)
    params = {"axes": (1,), "dtype": x.dtype, "soft_cap": None, "return_total": False, "implementation": None}

    def pushed(x, t, labels):
        return jax.jvp(
            lambda x: across_devices.cross_entropy_of_parts(
                ("model",), params, x, labels[:, None].astype(np.int32), None, None
            ),
            (x,),
            (t,),
        )

    with jax.set_mesh(make_mesh(AxisType.Auto)):
        spec = P("data", "model")
        (*_, d), (_, mean, of_m, of_d) = mapped(pushed, (spec, spec, P("data")), P("data"), check_vma)(x, t, labels)
    np.testing.assert_allclose(mean[:, 0], np.sum(np.asarray(jax.nn.softmax(x)) * t, -1), rtol=1e-12)
    np.testing.assert_array_equal(of_m, 0)
    np.testing.assert_allclose(of_d, d * mean, rtol=1e-14)


@pytest.mark.slow
def test_second_derivatives():
    x, labels = np.random.default_rng(0).standard_normal((4, 16)), np.array([0, 15, 7, 8])

    def gradient_of(losses):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(lambda x: total(losses(x)))(x))))

    with jax.set_mesh(make_mesh(AxisType.Auto)):
        f = functools.partial(jaxsoftmax.cross_entropy, axis_name="model", **ALL)
        outside = mapped(f, (P(None, "model"), P()), P(), True)
        actual = jax.jit(gradient_of(lambda x: outside(x, labels)))(x)
    oracle.assert_same_in_float64(actual, gradient_of(lambda x: jaxsoftmax.cross_entropy(x, labels, **ALL))(x))


@pytest.mark.parametrize(
    ("specs", "check_vma", "reduction", "class_axis", "options"),
    [
        pytest.param(specs, check_vma, *case, marks=cases.slow_unless(i == j and check_vma == (i % 2 == 0)))
        for check_vma in (True, False)
        for i, specs in enumerate(SPECS)
        for j, case in enumerate(
            [
                ("mean", 0, {}),
                ("sum", -1, ALL | {"ignore_index": 5}),
                ("none", 0, ALL | {"ignore_index": 5}),
                ("none", -1, {}),
                ("mean", -1, ALL | {"ignore_index": 5}),
            ]
        )
    ],
)
@pytest.mark.parametrize("without", cases.quick((), slow=[("bias", "sample_weight")]), ids=str)
@pytest.mark.usefixtures("parts")
def test_losses_of_a_linear_layer_in_a_shard_map(without, specs, reduction, class_axis, options, check_vma):
    rows, classes = specs
    options = options | {"class_axis": class_axis}
    arrays = {name: array for name, array in given(rows=(1024,), classes=CLASSES).items() if name not in without}
    if class_axis == 0:
        arrays["weight"] = arrays["weight"].T
    place = {"hidden": P(rows), "labels": P(rows), "sample_weight": P(rows), "bias": P(classes)}
    place |= {"weight": P(classes) if class_axis == 0 else P(None, classes)}
    place = {name: place[name] for name in arrays}

    def local(arrays):
        loss = by_parts(arrays, reduction=reduction, axis_name=classes, **options)
        return jax.lax.psum(loss, rows) if rows and reduction != "none" else loss

    def expected(arrays, **options):
        """A mean is one of a device's rows, and the map adds those up."""
        shards = make_mesh(AxisType.Auto).shape[rows] if rows and reduction == "mean" else 1
        split = {name: jnp.split(array, shards) for name, array in arrays.items() if place[name] == P(rows)}
        each = [whole(arrays | {name: split[name][i] for name in split}, reduction, **options) for i in range(shards)]
        return sum(each[1:], start=each[0])

    out = P(rows) if reduction == "none" else P()
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        outside = mapped(local, (place,), out, check_vma)
        actual = with_gradients(outside, arrays)
    oracle.assert_same_in_float64(actual, with_gradients(expected, arrays, **options))


@CHECKS
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("parts")
def test_a_shard_map_that_leaves_the_mesh_axis_of_rows(reduction, kind, check_vma):
    """Only XLA knows how rows are sharded over it, or their type says it."""
    place, temperature = {"hidden": P(), "weight": P(None, "model"), "labels": P()}, np.linspace(0.5, 2, 1024)
    arrays = {name: array for name, array in given(rows=(1024,), classes=CLASSES).items() if name in place}

    def local(arrays, **options):
        return by_parts(arrays, reduction=reduction, temperature=temperature, **options)

    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        options = {"axis_names": {"model"}, "check_vma": check_vma}
        f = functools.partial(local, axis_name="model")
        outside = jax.jit(jax.shard_map(f, in_specs=(place,), out_specs=P(), **options))
        placed = arrays | {"hidden": jax.device_put(arrays["hidden"], NamedSharding(mesh, P("data")))}
        actual = with_gradients(outside, placed)
    oracle.assert_same_in_float64(actual, with_gradients(local, arrays))


@pytest.mark.parametrize(
    ("labels", "reduction", "how"),
    [
        pytest.param(labels, reduction, how, marks=cases.slow_unless((i + j + k) % 2 == 0))
        for i, labels in enumerate(["classes", "probabilities"])
        for j, reduction in enumerate(["sum", "none"])
        for k, how in enumerate(["checked", "unchecked", "explicit"])
    ],
)
@pytest.mark.usefixtures("parts")
def test_all_results_of_a_linear_layer(labels, reduction, how):
    """With temperatures: the loss, the log-sum-exp and the entropy, and their gradients, where devices share classes."""
    arrays = given(rows=(512,), classes=CLASSES) | {"temperature": np.linspace(0.5, 2, 512)}
    place = {name: P("data") for name in arrays} | {"weight": P(None, "model"), "bias": P("model")}
    if labels == "probabilities":
        arrays["labels"] = np.random.default_rng(1).random((512, CLASSES))
        place["labels"] = P("data", "model")
    options = ALL | {"reduction": reduction, "return_lse": True, "return_entropy": True}

    def local(arrays):
        loss, *others = by_parts(arrays, axis_name="model", **options)
        return jax.lax.psum(loss, "data") if reduction == "sum" else loss, *others

    def run(f, arrays):
        def total(arrays):
            results = f(arrays)
            return sum(jnp.sum(jnp.sin(each)) for each in results), results

        (_, results), gradients = jax.jit(jax.value_and_grad(total, has_aux=True, allow_int=True))(arrays)
        return results, {name: gradients[name] for name in gradients if name != "labels" or labels == "probabilities"}

    expected = run(functools.partial(whole, **options), arrays)
    mesh = make_mesh(AxisType.Explicit if how == "explicit" else AxisType.Auto)
    with jax.set_mesh(mesh):
        if how == "explicit":
            sharded = {name: jax.device_put(each, NamedSharding(mesh, place[name])) for name, each in arrays.items()}
            actual = run(functools.partial(by_parts, **options), sharded)
        else:
            out = P() if reduction == "sum" else P("data")
            actual = run(mapped(local, (place,), (out, P("data"), P("data")), how == "checked"), arrays)
    oracle.assert_same_in_float64(actual, expected)


@pytest.mark.parametrize("reduction", ["sum", pytest.param("none", marks=pytest.mark.slow)])
@CHECKS
def test_second_derivatives_of_a_linear_layer(check_vma, reduction, request):
    """By the temperature too, which the merge of states must not count twice."""
    if reduction == "none":
        request.getfixturevalue("parts")
    arrays = given(rows=(256,), classes=CLASSES) | {"temperature": np.linspace(0.5, 2, 256)}
    place = {name: P() for name in arrays} | {"weight": P(None, "model"), "bias": P("model")}
    labels, wrt = arrays.pop("labels"), arrays

    def second(f):
        gradient = jax.grad(lambda wrt: jnp.sum(jnp.sin(f(wrt | {"labels": labels}))))
        return jax.jit(lambda wrt: jax.jvp(gradient, (wrt,), (jax.tree.map(jnp.cos, wrt),))[1])(wrt)

    expected = second(functools.partial(whole, reduction=reduction))
    local = functools.partial(by_parts, axis_name="model", reduction=reduction)
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        actual = second(mapped(local, (place,), P(), check_vma))
    oracle.assert_same_in_float64(actual, expected)


@pytest.mark.parametrize("devices", cases.quick(2, slow=[1, 4]))
@CHECKS
@pytest.mark.usefixtures("parts")
def test_second_derivatives_by_the_temperature_of_parts(check_vma, devices):
    """A loop over parts merges the states: in its body JAX drops the rules of functions of `jax.custom_jvp`."""
    rows = 128 * max(devices, 2)
    arrays, temperature = given(rows=(rows,), classes=CLASSES), np.linspace(0.5, 2, rows)
    place = {name: P() for name in arrays} | {"weight": P(None, "model"), "bias": P("model"), "temperature": P()}

    def second(f):
        gradient = jax.grad(lambda temperature: jnp.sin(f(arrays | {"temperature": temperature})))
        return jax.jit(lambda t: jax.jvp(gradient, (t,), (jnp.cos(t),))[1])(temperature)

    with jax.set_mesh(make_mesh(AxisType.Auto, (8 // devices, devices))):
        local = functools.partial(by_parts, axis_name="model", reduction="sum", label_smoothing=0.1, z_loss=0.01)
        actual = second(mapped(local, (place,), P(), check_vma))
    expected = second(functools.partial(whole, reduction="sum", label_smoothing=0.1, z_loss=0.01))
    oracle.assert_same_in_float64(actual, expected)


def test_gradients_inside_a_shard_map_that_checks_what_varies():
    arrays = given(rows=(64,), classes=CLASSES)
    arrays.pop("sample_weight"), arrays.pop("bias")
    place = {"hidden": P("data"), "weight": P(None, "model"), "labels": P("data")}

    def step(arrays, **options):
        labels = arrays.pop("labels")
        return jax.value_and_grad(lambda wrt: by_parts(wrt | {"labels": labels}, reduction="sum", **options))(arrays)

    def local(arrays):
        loss, gradients = step(arrays, axis_name="model")
        return jax.lax.psum(loss, "data"), gradients

    out = P(), {"hidden": P("data"), "weight": P(None, "model")}
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        actual = mapped(local, (place,), out, True)(dict(arrays))
    oracle.assert_same_in_float64(actual, jax.jit(step)(dict(arrays)))


@pytest.mark.parametrize("is_differentiated", [False, True])
@CHECKS
def test_collectives_in_a_shard_map(check_vma, is_differentiated):
    """Of the logits one all-gather of what belongs to rows; of a linear layer one for each part, and one sum of gradients."""
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        losses = functools.partial(jaxsoftmax.cross_entropy, axis_name="model")
        f = mapped(losses, (P("data", "model"), P("data")), P("data"), check_vma)
        x, labels = logits_and_labels()
        f = jax.grad(lambda x, labels, f=f: jnp.sum(f(x, labels))) if is_differentiated else f
        found = collectives_of(jax.jit(f).lower(x, labels).compile())
        backward = ["all-reduce"] * (is_differentiated and not check_vma)
        assert sorted(found[0]) == ["all-gather", *backward]
        assert found[1] <= 3 * 2 * ROWS // 4

        def local(hidden, weight, labels):
            loss = jaxsoftmax.linear_cross_entropy(hidden, weight, labels, reduction="sum", axis_name="model")
            return jax.lax.psum(loss, "data")

        f = mapped(local, (P("data"), P(None, "model"), P("data")), P(), check_vma)
        f = jax.grad(f, (0, 1)) if is_differentiated else f
        names, largest = collectives_of(jax.jit(f).lower(np.ones((64, 8)), np.ones((8, CLASSES)), np.zeros(64, int)).compile())
        assert names.count("all-gather") == 1
        assert largest == (8 * CLASSES // 2 if is_differentiated else 3 * 2 * 64 // 4)


@pytest.mark.parametrize("primitive", ["cross_entropy", "linear_cross_entropy"])
def test_kernels_run_on_the_classes_of_a_device(primitive):
    types = [jax.ShapeDtypeStruct(*kind) for kind in [((1024, 4096), jnp.bfloat16), ((1024,), np.int32)]]
    specs = [P("data", "model"), P("data")]
    if primitive == "linear_cross_entropy":
        types[:1] = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 64), (64, 4096))]
        specs[:1] = P("data"), P(None, "model")
    loss = functools.partial(getattr(jaxsoftmax, primitive), axis_name="model")
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        f = jax.shard_map(lambda *xs: jax.lax.psum(jnp.sum(loss(*xs)), "data"), in_specs=tuple(specs), out_specs=P())
        forward, backward = (jaxsoftmax.explain(g, *types, platform="cuda") for g in (f, jax.grad(f)))
        text = jax.jit(jax.grad(f)).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    cases.assert_all_run_on("mosaic", forward)
    cases.assert_all_run_on("mosaic", backward)
    assert [d.primitive for d in forward] == [primitive.replace("linear_cross_entropy", "linear_log_probs")]
    is_layer = primitive == "linear_cross_entropy"
    names = ["linear_cross_entropy_gradient"] if is_layer else ["cross_entropy", "cross_entropy_vjp"]
    assert [d.primitive for d in backward] == names
    assert ("output_operand_alias" in text) == is_layer
    assert {d.operands[0] for d in backward} == {"bfloat16[256,64]" if is_layer else "bfloat16[256,2048]"}


@pytest.mark.parametrize("class_axis", [-1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_kernels", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("parts")
def test_classes_that_devices_cannot_share_evenly(has_kernels, reduction, class_axis):
    """On automatic axes, where arguments of a program are whole and XLA is told to shard them."""
    arrays, options = given(rows=(512,), classes=61), {"class_axis": class_axis, "reduction": reduction}
    if class_axis == 0:
        arrays["weight"] = arrays["weight"].T
    mesh, spec = make_mesh(AxisType.Auto), P(None, ("data", "model")) if class_axis else P(("data", "model"))

    def f(arrays, **options):
        weight = jax.lax.with_sharding_constraint(arrays["weight"], NamedSharding(mesh, spec))
        return by_parts(arrays | {"weight": weight}, **options)

    with kernels.plugged_in_local("cross_entropy") if has_kernels else jax.set_mesh(mesh), jax.set_mesh(mesh):
        actual = jax.jit(functools.partial(with_gradients, f, **options))(arrays)
    oracle.assert_same_in_float64(actual, with_gradients(whole, arrays, **options))


@pytest.mark.parametrize(
    "specs", cases.every_other([(P("data"), P(None, "model")), (P(), P(None, ("data", "model")))]), ids=str
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("parts")
def test_shards_of_a_linear_layer_have_kernels(reduction, kind, specs):
    mesh, arrays = make_mesh(kind), given(rows=(1024,), classes=CLASSES)
    options = {"reduction": reduction, "ignore_index": 5, **ALL}
    with kernels.plugged_in_local("cross_entropy") as local, jax.set_mesh(mesh):
        sharded, _ = sharded_over(mesh, *specs, arrays)
        compiled = jax.jit(functools.partial(with_gradients, by_parts, **options)).lower(sharded).compile()
        actual = compiled(sharded)
    widths = {shapes[0][-1] for shapes in local.shapes if len(shapes[0]) == 2}
    assert CLASSES // np.prod([mesh.shape[name] for name in names_of(specs[1][1])]) in widths
    oracle.assert_same_in_float64(actual, with_gradients(whole, arrays, **options))


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize(
    ("axis_name", "error", "words"),
    [
        (3, TypeError, "must be None, a string or a sequence of strings, got 3"),
        ("classes", ValueError, "must name mesh axes, each once, of a shard_map around the call, got 'classes'"),
        (("model", "model"), ValueError, r"must name mesh axes, each once, .* got \('model', 'model'\)"),
    ],
)
def test_mesh_axes_that_are_none_are_refused(name, axis_name, error, words):
    arrays = [np.ones((2, 4)), *([np.ones((4, 8))] if name != "cross_entropy" else []), np.zeros(2, int)]
    f = functools.partial(getattr(jaxsoftmax, name), axis_name=axis_name)
    with jax.set_mesh(make_mesh(AxisType.Auto)), pytest.raises(error, match=f"{name}: axis_name {words}"):
        jax.shard_map(f, in_specs=P(), out_specs=P())(*arrays)
    if axis_name == "classes":
        with pytest.raises(error, match=f"{name}: axis_name {words}"):
            f(*arrays)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("of_weight", [P(None, "model"), pytest.param(P(), marks=pytest.mark.slow)], ids=str)
@pytest.mark.usefixtures("parts")
def test_vmap_over_an_explicit_axis(of_weight, reduction):
    mesh, rng = make_mesh(AxisType.Explicit), np.random.default_rng(0)
    hidden, weight = rng.standard_normal((8, 300, 16)), rng.standard_normal((16, CLASSES))
    labels = rng.integers(0, CLASSES, (8, 300))
    losses = jax.vmap(functools.partial(jaxsoftmax.linear_cross_entropy, reduction=reduction), (0, None, 0))

    def both(hidden, weight, labels):
        return losses(hidden, weight, labels), jax.grad(lambda *wrt: total(losses(*wrt, labels)), (0, 1))(hidden, weight)

    with jax.set_mesh(mesh):
        specs = P("data"), of_weight, P("data")
        sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((hidden, weight, labels), specs, strict=True)]
        actual = jax.jit(both)(*sharded)
        narrow = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding) for a in sharded[:2]]
        kernels.lowered_for_cuda(losses, *narrow, sharded[2])
    oracle.assert_same_in_float64(actual, jax.jit(both)(hidden, weight, labels))


def test_masks_where_each_device_has_one_class():
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((ROWS, 8)), np.arange(ROWS)
    of_classes, of_rows = (rng.random((ROWS, 8)) < 0.7) | np.eye(8, dtype=bool), np.arange(ROWS) != 3
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        for where, spec in ((of_classes, P(None, ("data", "model"))), (of_rows, P())):
            losses = functools.partial(jaxsoftmax.cross_entropy, label_smoothing=0.2)

            def local(x, labels, where, losses=losses):
                return losses(x, labels, where=where, axis_name=("data", "model"))

            found = mapped(local, (P(None, ("data", "model")), P(), spec), P(), True)(x, labels, where)
            oracle.assert_same_in_float64(found, losses(x, labels, where=where))
