"""What a kernel is told of its operands: where they come from, and that they are given as they were before a cast."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax import categorical, cross_entropy, entropy, explain, log_probs, log_softmax, logsumexp, softmax, top_k
from jaxsoftmax._core import lower
from jaxsoftmax._core.implementation import ReferencePlan, Refusal
from jaxsoftmax._core.problem import Problem
from jaxsoftmax.ops.softmax import across_devices
from jaxsoftmax.ops.softmax.primitive import SOFTMAX

from ..support import cases, kernels, oracle, xla_cuda
from ..support.cross_entropy import oracle as losses
from ..support.meshes import collectives_of

pytestmark = pytest.mark.usefixtures("hollow_kernels")

B, F = jnp.bfloat16, jnp.float32


class Noting(kernels.Local):
    """The reference under another name, which notes what it is told, and says that fused operands do not pay if `picky`."""

    def __init__(self):
        super().__init__("softmax", "cpu", "cuda")
        self.told, self.ran, self.picky, self.unsupported_dtypes = [], [], False, ()

    def plan(self, problem, target):
        assert problem.fused | set(problem.dtypes) <= set(problem.operands)
        operands = dict.fromkeys(problem.operation.by_name) | dict(problem.operands)
        dtypes = tuple(a and a.dtype.name for a in operands.values())
        if found := [name for name in dtypes if name in self.unsupported_dtypes]:
            return Refusal(f"it does not take {found[0]}")
        self.told.append((problem.operation.name, tuple(name in problem.fused for name in operands), dtypes))
        plan = super().plan(dataclasses.replace(problem, dtypes={}), target)
        return Refusal("XLA fuses what produces its operand", plan) if self.picky and problem.fused else plan

    def run(self, function, **given):
        dtypes = tuple(value.dtype.name for value in given.values() if isinstance(value, jax.Array))
        self.ran.append((function.__name__, dtypes))
        return function(**given)


@pytest.fixture
def noting(monkeypatch):
    module = Noting()
    monkeypatch.setattr(across_devices, "slower_states", lambda x: None)  # parts of rows are short here
    with kernels.plugged_in("softmax", "noting", lambda: module, "cpu", "cuda"):
        yield module


def shape(*sizes, dtype=B):
    return jax.ShapeDtypeStruct(sizes, dtype)


X, W, ROW, MASK = shape(8, 128), shape(128, 128), shape(128), shape(8, 128, dtype=jnp.bool)
HEADS = shape(2, 16, 4, 8)


def scaled_products(q):
    return jnp.einsum("bqhd,bkhd->bhqk", q, q) * B(0.125)


def causal(q):
    return jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scaled_products(q), B(-1e9))


def dropped(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x, B(0))


def scanned(x):
    return lax.scan(lambda c, _: (softmax(c.astype(F)).astype(B), None), x, length=3)[0]


def barred(x):
    return lax.optimization_barrier(x * B(2))


@jax.custom_jvp
def doubled(x):
    return x * B(2)


doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0] * B(2)))

# What the scores are computed from, and whether XLA would fuse that with its own softmax.
PRODUCERS = {
    "argument": (lambda x: x, [X], False),
    "constant": (lambda: np.ones((8, 128), np.float32), [], False),
    "scale and bias": (lambda x, b: x * B(0.3) + b[None], [X, ROW], True),
    "where": (lambda x, m: jnp.where(m, x, B(-1e9)), [X, MASK], True),
    "relu": (jax.nn.relu, [X], True),
    "gelu": (jax.nn.gelu, [X], True),
    "softplus": (jax.nn.softplus, [X], True),
    "clip": (lambda x: jnp.clip(x, B(-1), B(1)), [X], True),
    "custom_jvp": (doubled, [X], True),
    "dropout": (dropped, [X], True),
    "iota": (lambda: lax.broadcasted_iota(F, (8, 128), 1), [], True),
    "broadcast": (lambda b: jnp.broadcast_to(b, (8, 128)), [ROW], True),
    "slice": (lambda x: x[:, :100], [X], True),
    "narrowing cast": (lambda x: x.astype(B), [shape(8, 128, dtype=F)], True),
    "cast of integers": (lambda x: x.astype(F), [shape(8, 128, dtype=jnp.int8)], True),
    "axis of size 1": (lambda b: b[None], [ROW], False),
    "reshape": (lambda x: x.reshape(4, 256), [X], False),
    "reshape of a sum": (lambda x: (x + x).reshape(4, 256), [X], False),
    "reshape of a sum, rows kept": (lambda x: (x + x).reshape(2, 4, 128), [X], True),
    "reshaped, then in use": (lambda x: (x + x).reshape(4, 256) * B(2), [X], True),
    "reshaped product, scaled": (lambda x, w: (x @ w).reshape(4, 256) * B(0.3), [X, W], False),
    "long rows": (lambda x: x + x, [shape(4, 131072)], True),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (0, 8))), [X], False),
    "reverse": (lambda x: x[:, ::-1], [X], False),
    "loop": (lambda x: lax.fori_loop(0, 3, lambda i, x: x * B(2), x), [X], False),
    "transpose": (lambda x: x.T, [X], False),
    "concatenate": (lambda x: jnp.concatenate([x, x]), [X], False),
    "gather": (lambda x, i: x[i], [X, shape(4, dtype=jnp.int32)], False),
    "reduce": (lambda x: x.sum(-1), [shape(64, 512, 128)], False),  # in float32, then narrowed
    "reduced, then in use": (lambda x: x - x.max(-1, keepdims=True), [X], True),
    "sorted": (jnp.sort, [X], False),
    "barrier": (barred, [X], False),
    # XLA makes what comes after the product a part of it
    "product": (lambda x, w: x @ w, [X, W], False),
    "product, scale and bias": (lambda x, w, b: (x @ w) * B(0.3) + b[None], [X, W, ROW], False),
    "relu of product and bias": (lambda x, w, b: jax.nn.relu(x @ w + b[None]), [X, W, ROW], False),
    "capped product": (lambda x, w: jnp.tanh(x @ w / B(30)) * B(30), [X, W], False),
    "narrowed product": (lambda x, w: jnp.dot(x, w, preferred_element_type=F).astype(B), [X, W], False),
    "scaled attention": (scaled_products, [HEADS], False),
    # but not this
    "masked attention": (causal, [HEADS], True),
    "widened product, scaled": (lambda x, w: (x @ w).astype(F) * F(0.3), [X, W], True),
    "scaled by a product": (lambda x, w, b: x * (w @ b)[None], [X, W, ROW], True),
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_it_is_known_whether_xla_would_fuse_the_operand(noting, name):
    scores, avals, expected = PRODUCERS[name]
    for platform in ("cpu", "cuda"):
        noting.told.clear()
        explain(lambda *args: softmax(scores(*args)), *avals, platform=platform)
        assert [fused for _, fused, _ in noting.told] == [(expected, False, False)]


# What XLA does otherwise than is guessed, None where it takes no maximum over the scores; and what else it does since 0.12.
OTHERWISE: dict[str, bool | None] = {"constant": None, "iota": None, "reshaped, then in use": False}
SINCE_0_12 = {"scaled attention": True}  # the product has its batch axes merged, and is scaled after they are split again


@pytest.mark.parametrize("name", PRODUCERS)
def test_xla_fuses_for_cuda_what_it_is_known_to_fuse(name):
    xla_cuda.skip_unless_it_compiles()
    scores, avals, expected = PRODUCERS[name]
    known = OTHERWISE | (SINCE_0_12 if jax.__version_info__ >= (0, 12) else {})
    assert xla_cuda.is_fused(scores, *avals) == known.get(name, expected)


WRAPPED = {
    "vmap": (jax.vmap(lambda x: softmax(x * B(2))), True),
    "checkpoint": (jax.checkpoint(lambda x: softmax(x * B(2))), True),
    "scan": (scanned, False),
    "a sum in a scan": (lambda x: lax.scan(lambda c, _: (softmax(c + c), None), x, length=3)[0], True),
    "a jitted function around": (lambda x: jax.jit(lambda x: softmax(x * B(2)))(x), True),
    "a jitted function's argument": (lambda x: jax.jit(softmax)(x * B(2)), False),  # its caller is out of sight
}


@pytest.mark.parametrize("name", WRAPPED)
def test_it_is_known_inside_transformations(noting, name):
    f, expected = WRAPPED[name]
    explain(f, X)
    assert [fused[0] for _, fused, _ in noting.told] == [expected]


def test_many_paths_to_the_same_producer_are_walked_once(noting):
    def f(x):
        for _ in range(200):
            x = x * x
        return softmax(x)

    explain(f, X)
    assert [fused[0] for _, fused, _ in noting.told] == [True]


@pytest.mark.parametrize(("rows", "whole"), [(8, True), (1, False)])
def test_whole_masks_are_looked_at_but_not_scales_and_states(noting, rows, whole):
    def f(x, s):
        where = x[:rows] > B(0)
        return jax.grad(lambda x: jnp.sum(log_softmax(x, where=where, scale=s * F(2)) * B(2)).astype(F))(x)

    explain(f, X, shape(dtype=F))
    assert [(name, fused) for name, fused, _ in noting.told] == [
        ("log_softmax", (False, whole, False)),
        ("log_softmax_vjp", (False, False, False, True, whole, False)),
    ]


@pytest.mark.parametrize(("loss", "computed"), [(jnp.sum, False), (jnp.mean, True)])
def test_a_cotangent_times_one_is_in_memory(noting, loss, computed):
    explain(jax.grad(lambda x, c: loss(softmax(x) * c).astype(F)), X, X)
    assert [(name, fused[1]) for name, fused, _ in noting.told] == [("softmax", False), ("softmax_jacobian", computed)]


# Casts.

CASTS = {
    "cast": lambda x: x.astype(F),
    "reshaped": lambda x: x.astype(F).reshape(4, 256),
    "transposed": lambda x: x.astype(F).T,
    "cut": lambda x: x.astype(F)[1:, :100],
    "broadcast": lambda x: jnp.broadcast_to(x.astype(F), (2, 8, 128)),
    "of a sum": lambda x: (x + x).astype(F),
}


def sample(dtype, sizes=(8, 128), seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(sizes), dtype)


@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float16"]))
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("op", [softmax, log_softmax, logsumexp])
def test_a_kernel_gets_the_scores_before_the_cast(noting, op, name, dtype):
    def f(x):
        return op(CASTS[name](x), axis=-1)

    (decision,) = explain(f, shape(8, 128, dtype=dtype))
    assert decision.operands[0].startswith(f"{dtype}[")
    x = sample(dtype)
    actual = jax.jit(f)(x)
    assert noting.ran[-1][1] == (dtype,)
    assert actual.dtype == F
    assert oracle.error(actual, getattr(oracle, op.__name__)(CASTS[name](x), -1)) <= 1


def test_no_other_cast_is_taken_back(noting):
    for source, result in [("float32", "bfloat16"), ("int8", "float32"), ("float16", "bfloat16")]:
        (decision,) = explain(lambda x, result=result: softmax(x.astype(result)), shape(8, 128, dtype=source))
        assert decision.operands == (f"{result}[8,128]",)


@pytest.mark.parametrize("op", [softmax, log_softmax, logsumexp])
def test_derivatives_get_operands_before_casts_and_give_the_same_dtypes(noting, op):
    def gradient(x, c, **options):
        y, vjp = jax.vjp(lambda x: op(x.astype(F), axis=-1, **options), x)
        return y, *vjp(c.astype(F))

    x, c = sample("bfloat16"), sample("float16", jax.eval_shape(functools.partial(op, axis=-1), X).shape, 1)
    assert "bfloat16[8,128]" in explain(gradient, x, c)[1].operands or op is softmax
    actual = jax.jit(gradient)(x, c)
    assert oracle.error(actual[0], getattr(oracle, op.__name__)(x, -1)) <= 1
    cotangent = oracle.softmax_derivative if op is softmax else getattr(oracle, f"{op.__name__}_cotangent")
    assert oracle.error(actual[1], cotangent(x, c, -1)) <= 1
    assert [a.dtype for a in actual] == [F, B]
    name, dtypes = noting.ran[-1]
    assert (name, dtypes) == {
        softmax: ("softmax_jacobian", ("float32", "float16")),
        log_softmax: ("log_softmax_vjp", ("bfloat16", "float32", "float32", "float16")),
        logsumexp: ("logsumexp_vjp", ("bfloat16", "float32", "float32", "float32")),  # c belongs to rows
    }[op]


# Factors.

S, ROWS, LONG = shape(dtype=F), shape(8, dtype=F), shape(8, 32768)
WIDE = shape(8, 128, dtype=F)

# Products in front of an op, and the operand that a kernel then reads, or None if it reads the product.
FACTORS = {
    "a number": (lambda x: x / 0.7, [WIDE], "float32[8,128]"),
    "a scalar": (lambda x, s: s * x, [WIDE, S], "float32[8,128]"),
    "one for each row": (lambda x, s: x / s[:, None], [WIDE, ROWS], "float32[8,128]"),
    "a constant array": (lambda x: x * np.full((8, 128), 3, np.float32), [WIDE], "float32[8,128]"),
    "of 16 bits": (lambda x, s: x / s, [X, shape()], "bfloat16[8,128]"),
    "behind a cast": (lambda x, s: x.astype(F) / s, [X, S], "bfloat16[8,128]"),
    "of a widened product": (lambda x, w: (x @ w).astype(F) * F(0.3), [X, W], "bfloat16[8,128]"),
    "reshaped": (lambda x, s: (x / s).reshape(2, 4, 128), [WIDE, S], "float32[2,4,128]"),
    "in a map over both": (jax.vmap(lambda x, s: x / s), [WIDE, ROWS], "float32[8,128]"),
    "along the row": (lambda x, v: x / v[None], [WIDE, shape(128, dtype=F)], None),
    "of rows, reshaped": (lambda x, r: (x / r[:, None]).reshape(2, 4, 128), [WIDE, ROWS], None),
    "not constant": (lambda x, y: x * y, [WIDE, WIDE], None),
    "the dividend": (lambda x: 1 / x, [WIDE], None),
    "of a sum": (lambda x, s: jnp.tanh(x) / s, [WIDE, S], None),
    "two": (lambda x, s, r: x.astype(F) * r[:, None] / s, [X, S, ROWS], None),
    "in a map over factors": (jax.vmap(lambda x, s: x / s, (None, 0)), [WIDE, ROWS], None),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("op", [log_softmax, logsumexp])
def test_a_kernel_takes_a_factor_of_rows(op, name):
    f, avals, expected = FACTORS[name]
    (decision,) = explain(lambda *args: op(f(*args), axis=-1), *avals, gpu="h100")
    assert decision.implementation == ("xla" if expected is None else "mosaic")
    assert decision.plan.endswith(", times a factor") == (expected is not None)
    assert expected in (None, decision.operands[0])


def test_softmax_takes_a_factor_unless_a_cast_back_may_follow():
    def f(x, s):
        return softmax(x.astype(F) / s)

    assert [explain(f, x, S, gpu="h100")[0].implementation for x in (WIDE, LONG, X)] == ["mosaic", "mosaic", "xla"]
    (decision,) = explain(lambda x, s: softmax(x / s[None], axis=0), WIDE, shape(128, dtype=F), gpu="h100")
    assert decision.plan.endswith(", times a factor")


def zeros_of(x):
    return jnp.zeros(x.shape[:-1], jnp.int32)


LOSSES = {
    "cross_entropy": lambda x, **options: cross_entropy(x, zeros_of(x), label_smoothing=0.1, **options),
    "capped": lambda x, **options: cross_entropy(x, zeros_of(x), logits_soft_cap=5.0, **options),
    "scaled": lambda x, **options: log_probs(x, zeros_of(x), scale=0.5, return_entropy=True, **options),
    "several ids": lambda x, **options: log_probs(x, jnp.zeros((*x.shape[:-1], 3), jnp.int32), **options),
    "entropy": entropy,
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("loss", ["cross_entropy", "entropy"])
def test_a_loss_takes_a_factor_of_rows(loss, name):
    f, avals, expected = FACTORS[name]
    (decision,) = explain(lambda *args: LOSSES[loss](f(*args)), *avals, gpu="h100")
    assert decision.implementation == ("xla" if expected is None else "mosaic")
    assert decision.plan.endswith(", times a factor") == (expected is not None)
    assert expected in (None, decision.operands[0])


@pytest.mark.parametrize("name", ["a scalar", "one for each row", "behind a cast", "of 16 bits"])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_product_is_written_before_a_loss(loss, name):
    f, avals, _ = FACTORS[name]
    if (loss, name) == ("several ids", "of 16 bits"):  # these need the state, which is that of the rounded product
        return
    assert not kernels.products_in_use(lambda *args: LOSSES[loss](f(*args)), *avals)
    assert kernels.products_in_use(lambda *args: LOSSES[loss](f(*args), implementation="xla"), *avals)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_losses_behind_a_factor(loss):
    """The reference adds to a gradient at the labels before the factor multiplies it; that of an entropy is one pass."""

    def total(x, s, **options):
        return sum(map(jnp.sum, jax.tree.leaves(LOSSES[loss](x / s[:, None], **options))))

    both = explain(jax.value_and_grad(total), WIDE, ROWS, gpu="h100")
    has_labels = loss not in ("entropy", "several ids")
    assert [d.implementation for d in both] == ["mosaic", "mosaic" if has_labels else "xla"]
    forced = explain(functools.partial(jax.value_and_grad(total), implementation="mosaic"), WIDE, ROWS, gpu="h100")
    assert [d.plan.endswith("a factor") for d in forced] == [True, True]
    # The one product of the whole size is that of the gradient.
    assert len(kernels.products_in_use(jax.grad(total), WIDE, ROWS)) == 1 or not has_labels


def test_the_state_of_a_loss_of_16_bits_is_that_of_the_rounded_product():
    both = explain(jax.grad(lambda x, s: jnp.sum(LOSSES["cross_entropy"](x * s)).astype(F)), X, shape(), gpu="h100")
    assert [d.implementation for d in both] == ["xla", "xla"]


@pytest.mark.parametrize("name", FACTORS)
def test_a_sample_takes_a_factor_of_rows(name):
    """The operand has the axes of the rows."""
    f, avals, expected = FACTORS[name]

    def sample(*args, **options):
        return categorical(jax.random.key(0), f(*args), **options)

    (decision,) = explain(sample, *avals, gpu="h100")
    assert decision.implementation == ("xla" if expected is None else "mosaic")
    assert decision.plan.endswith(", times a factor") == (expected is not None)
    assert expected in (None, decision.operands[0])
    assert expected is None or not kernels.products_in_use(sample, *avals)


@pytest.mark.parametrize(
    ("options", "implementation"), [({"top_p": 0.9}, "mosaic"), ({"min_p": 0.1}, "mosaic"), ({"shape": (4, 8)}, "xla")]
)
def test_other_samples_are_those_of_the_product(options, implementation):
    decisions = explain(lambda x, s: categorical(jax.random.key(0), x.astype(F) / s, **options), X, S, gpu="h100")
    assert {(d.implementation, d.operands[0][:7]) for d in decisions} == {(implementation, "float32")}
    assert not any("a factor" in d.plan for d in decisions)
    with_log_prob = functools.partial(categorical, return_log_prob=True)
    decisions = explain(lambda x, s: with_log_prob(jax.random.key(0), x * s), X, shape(), gpu="h100")
    assert not any("a factor" in d.plan for d in decisions)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float64, jnp.complex64])
def test_other_arithmetic_keeps_its_factor(dtype):
    with jax.enable_x64(True):
        (decision,) = explain(lambda x: softmax(x * jnp.asarray(2, dtype)), shape(8, 128, dtype=dtype), gpu="h100")
    assert decision.implementation == "xla"


@pytest.mark.parametrize("op", [softmax, log_softmax, logsumexp])
def test_gradients_behind_a_factor(op):
    """Behind a kernel the factor of the gradient would be one more pass over memory, unless the kernel is forced."""

    def gradient(x, s, c, **options):
        return jax.vjp(lambda x: op(x / s, axis=-1, **options), x)[1](c)

    c = jax.eval_shape(functools.partial(op, axis=-1), WIDE)
    both = explain(gradient, WIDE, S, c, gpu="h100")
    assert [d.implementation for d in both] == ["mosaic", "mosaic" if op is softmax else "xla"]
    forced = explain(functools.partial(gradient, implementation="mosaic"), WIDE, S, c, gpu="h100")
    assert [d.plan.endswith("a factor") for d in forced] == [True, op is not softmax]


@pytest.mark.parametrize("op", [log_softmax, logsumexp])
def test_a_state_of_16_bits_is_that_of_the_rounded_product(op):
    both = explain(lambda x, s: jax.vjp(lambda x: op(x * s, axis=-1), x), X, shape(), gpu="h100")
    assert [d.implementation for d in both] == ["xla"]


def test_the_reference_computes_what_it_computed_without_the_factor(monkeypatch):
    module = Noting()
    module.unsupported_dtypes = ("bfloat16", "float32")

    def compiled():
        with kernels.plugged_in("softmax", "noting", lambda: module, "cpu", takes_factor=True):
            f = jax.jit(lambda x, s: jax.value_and_grad(lambda x: jnp.sum(log_softmax(x.astype(F) / s)[:, 0]))(x))
            return f.lower(X, S).compile().as_text().split("\n", 1)[1]  # behind the name of the module

    programs = []
    for takes_factor in (True, False):
        if not takes_factor:
            monkeypatch.setattr(lower, "_factored", lambda site, *_: site)
        programs.append(compiled())
    assert programs[0] == programs[1]


def test_a_kernel_that_is_forced_and_takes_no_factor_gets_the_product(noting):
    (decision,) = explain(lambda x: softmax(x * B(2), implementation="noting"), X)
    assert (decision.implementation, noting.told[-1][1][0]) == ("noting", True)


# Cotangents.

IDS = shape(8, dtype=jnp.int32)


def along_rows(y, ids, mode=None):
    return jnp.take_along_axis(y, ids[:, None], 1, mode=mode)


# What reads the result of an op, and whether its cotangent is known as a comparison with an index.
ONE_HOT = {
    "take_along_axis": (along_rows, True),
    "promised to be inside": (functools.partial(along_rows, mode="promise_in_bounds"), True),
    "weighted": (lambda y, ids: 3 * along_rows(y, ids), True),
    "in a map": (lambda y, ids: jax.vmap(lambda row, at: row[at])(y, ids), True),
    "along the first axis": (lambda y, ids: jnp.take_along_axis(y.T, ids[None], 0), False),
    "several of a row": (lambda y, ids: jnp.take_along_axis(y, jnp.stack([ids, ids], 1), 1), False),
    "of whole rows": (lambda y, ids: y[ids], False),
    "of places": (lambda y, ids: y[jnp.arange(8), ids], False),
    "one_hot": (lambda y, ids: y * jax.nn.one_hot(ids, 128, dtype=y.dtype), True),
}


@pytest.mark.parametrize("name", ONE_HOT)
@pytest.mark.parametrize("op", [log_softmax, softmax])
def test_a_cotangent_with_one_number_in_each_row_is_fused(op, name):
    """XLA then writes neither zeros nor a scatter, and reads no cotangent."""
    reads, is_one_hot = ONE_HOT[name]

    def gradient(x, ids):
        return jax.grad(lambda x: jnp.sum(reads(op(x), ids)))(x)

    decision = explain(gradient, WIDE, IDS, gpu="h100")[-1]
    assert decision.implementation == ("xla" if is_one_hot else "mosaic")


@pytest.mark.parametrize("op", [log_softmax, softmax])
def test_xla_writes_no_cotangent_with_one_number_in_each_row(op):
    xla_cuda.skip_unless_it_compiles()
    x = shape(512, 4096, dtype=F)
    text = xla_cuda.compiled(jax.grad(lambda x, ids: jnp.sum(along_rows(op(x), ids))), x, shape(512, dtype=jnp.int32))
    main = text[text.index("ENTRY") :]
    assert len([line for line in main.splitlines() if " = f32[512,4096]" in line and " fusion(" in line]) == 1  # the gradient
    assert "scatter" not in text


def test_a_forced_kernel_reads_a_comparison():
    def gradient(x, ids):
        return jax.grad(lambda x: jnp.sum(along_rows(log_softmax(x, implementation="mosaic"), ids)))(x)

    assert [d.implementation for d in explain(gradient, WIDE, IDS, gpu="h100")] == ["mosaic", "mosaic"]


@pytest.mark.parametrize("shape_and_axis", [((8, 128), -1), ((2, 128, 3), 1), ((2, 4, 128), 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_chosen_entries(shape_and_axis, dtype):
    """An index outside of the row adds nothing, and one below 0 counts from the end."""
    sizes, axis = shape_and_axis
    x = sample(dtype, sizes)
    rows = np.delete(sizes, axis)
    ids = np.random.default_rng(1).integers(-128, 128, rows).astype(np.int32)
    ids.flat[:2] = 128, 2**31 - 1
    weights = np.random.default_rng(2).standard_normal(rows).astype(np.float32)
    places, weights = np.expand_dims(ids, axis), np.expand_dims(weights, axis)

    def gradient(x):
        def loss(x):
            y = log_softmax(x.astype(F), axis=axis, implementation="xla")
            return jnp.sum(weights * jnp.take_along_axis(y, places, axis))

        return jax.grad(loss)(x)

    with kernels.target(interpreted=True):
        lowered = jax.jit(gradient).lower(x)
    compares = [" stablehlo.iota " in text for text in (lowered.as_text(), jax.jit(gradient).lower(x).as_text())]
    assert compares == [True, False]  # a CPU scatters
    found = lowered.compile()(x)
    columns = np.arange(128).reshape([-1 if at == axis % len(sizes) else 1 for at in range(len(sizes))])
    cotangent = np.where(columns == np.where(places < 0, places + 128, places), weights, 0)
    assert oracle.error(found, oracle.log_softmax_cotangent(x, cotangent, axis)) <= 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_gradients_of_narrow_indices_that_do_not_count_the_columns(dtype):
    x, ids = sample("float32", (4, 300)), np.array([3, 100, 0, 7], dtype)

    def gradient(x):
        def loss(x):
            return jnp.sum(jax.vmap(lambda row, id_: row[id_])(log_softmax(x, implementation="xla"), ids))

        return jax.grad(loss)(x)

    with kernels.target(interpreted=True):
        lowered = jax.jit(gradient).lower(x)
    assert " stablehlo.iota " in lowered.as_text()
    assert oracle.error(lowered.compile()(x), oracle.log_softmax_cotangent(x, np.eye(300)[ids], -1)) <= 1


def test_a_scatter_to_other_rows_is_none_to_rows():
    """The result is read in another shape, whose middle axis is as long."""
    x, ids = sample("float32", (3, 128, 2)), np.arange(6, dtype=np.int32).reshape(2, 1, 3)

    def gradient(x):
        def loss(x):
            y = log_softmax(x, axis=1, implementation="xla").reshape(2, 128, 3)
            return jnp.sum(jnp.take_along_axis(y, ids, 1))

        return jax.grad(loss)(x)

    with kernels.target(interpreted=True):
        found = jax.jit(gradient)(x)
    cotangent = np.zeros((2, 128, 3))
    np.put_along_axis(cotangent, ids, 1, 1)
    assert oracle.error(found, oracle.log_softmax_cotangent(x, cotangent.reshape(3, 128, 2), 1)) <= 1


# Several readers.

# What an activation is read by first, and whether XLA then writes it.
READERS = {
    "a kernel": (lambda h: top_k(h, 5), True),
    "a kernel, in another shape": (lambda h: top_k(h.reshape(2, 4, 128), 5), True),
    "a kernel in a function": (lambda h: jax.jit(lambda h: top_k(h, 5))(h), True),
    "a sort": (jnp.sort, True),
    "lax.top_k": (lambda h: lax.top_k(h, 5), True),
    "a loop": (lambda h: lax.fori_loop(0, 3, lambda i, h: -h, h), True),
    "a barrier": (lax.optimization_barrier, True),
    "a sum": (jnp.sum, False),
    "a product": (lambda h: h @ h.T, False),
    "the reference": (lambda h: logsumexp(h, axis=-1), False),
    "a kernel that reads a part of it": (lambda h: top_k(h[:4], 5), False),
    "a kernel that reads what follows": (lambda h: top_k(h + 1, 5), False),
}


@pytest.mark.parametrize("name", READERS)
def test_an_operand_that_another_reader_needs_in_memory_is_there(name):
    first, is_written = READERS[name]

    def both(x):
        h = jax.nn.gelu(x)
        return first(h), logsumexp(h, axis=-1), categorical(jax.random.key(0), h)

    implementations = [d.implementation for d in explain(both, WIDE, gpu="h100")]
    assert implementations[-2:] == ["mosaic" if is_written else "xla"] * 2


def test_a_reader_that_is_lowered_later_is_out_of_sight():
    def three(x):
        h = jnp.tanh(x)
        return logsumexp(h, axis=-1), top_k(h, 5), entropy(h)

    assert [d.implementation for d in explain(three, WIDE, gpu="h100")] == ["xla", "mosaic", "mosaic"]


def test_a_gradient_does_not_count_its_written_operand():
    """XLA computes the gradient of the activation together with the reference."""

    def loss(x):
        h = jnp.tanh(x)
        return jnp.sum(top_k(h, 5)[0]) + jnp.sum(logsumexp(h, axis=-1))

    decisions = explain(jax.grad(loss), WIDE, gpu="h100")
    assert [d.implementation for d in decisions if d.primitive != "top_k"] == ["mosaic", "xla"]


def test_a_factor_is_taken_in_where_its_product_is_written():
    """The source has half the bytes; one that is computed would have to be written, and its product is already."""

    def readers(scores):
        return top_k(scores, 5), log_softmax(scores), entropy(scores)

    decisions = explain(lambda x, s: readers(x.astype(F) / s), X, S, gpu="h100")
    assert [d.operands[0] for d in decisions] == ["float32[8,128]", "bfloat16[8,128]", "bfloat16[8,128]"]
    decisions = explain(lambda x, s: readers(jnp.tanh(x) / s), WIDE, S, gpu="h100")
    assert [(d.implementation, d.plan.endswith("a factor")) for d in decisions] == [("mosaic", False)] * 3


# What is made of it.


def test_what_does_not_pay_is_left_to_the_reference_with_the_reason(noting):
    noting.picky = True
    both = explain(lambda x: (softmax(x.astype(F)), softmax((x + x).astype(F))), X)
    assert [(d.implementation, d.operands) for d in both] == [("noting", ("bfloat16[8,128]",)), ("xla", ("float32[8,128]",))]
    assert both[1].refusals == (("noting", "XLA fuses what produces its operand"),)
    assert "not noting: XLA fuses what produces its operand" in str(both)


def test_a_forced_implementation_runs_where_it_does_not_pay(noting):
    noting.picky = True
    (decision,) = explain(lambda x: softmax(x + x, implementation="noting"), X)
    assert (decision.implementation, decision.refusals) == ("noting", ())


def test_a_kernel_that_refuses_what_was_cast_is_not_asked_again(noting):
    noting.unsupported_dtypes = ("bfloat16",)
    (decision,) = explain(lambda x: softmax(x.astype(F)), X)
    assert (decision.implementation, decision.operands) == ("xla", ("float32[8,128]",))
    assert decision.refusals == (("noting", "it does not take bfloat16"),)


def test_the_reference_gets_the_scores_after_the_cast():
    problem = Problem(SOFTMAX, {"x": shape(8, 128, dtype=B)}, {}, dtypes={"x": np.dtype(F)})
    assert ReferencePlan(lambda x, where, scale: (x.dtype, where, scale), problem).run(x=sample("bfloat16")) == (F, None, None)


def test_a_real_kernel_reads_the_narrow_scores():
    with kernels.plugged_in("softmax", "probe", lambda: importlib.import_module("tests.core.probe"), "cuda"):
        text = kernels.lowered_for_cuda(lambda x: softmax(x.astype(F)), shape(64, 128), kernels=["softmax_forward_probe"])
    (call,) = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert "(tensor<64x128xbf16>" in call
    assert "-> tensor<64x128xf32>" in call


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")], ids=" and ".join)
def test_export(noting, platforms):
    x = sample("bfloat16")
    exported = jax.export.export(jax.jit(lambda x: softmax((x + x).astype(F))), platforms=platforms)(x)
    assert set(noting.told) == {("softmax", (True, False, False), ("bfloat16", None, None))}
    with jax.default_device(jax.devices("cpu")[0]):
        assert oracle.error(exported.call(x), oracle.softmax(x + x)) <= 1


# Shards.

MESHES = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@MESHES
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["rows", "columns"])
def test_shards(noting, kind, spec, constrained):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        x = jax.device_put(sample("bfloat16"), NamedSharding(mesh, spec))
        place = jax.sharding.reshard if kind == AxisType.Explicit else lax.with_sharding_constraint

        def f(x):
            wide = (x + x).astype(F)
            return softmax(place(wide, NamedSharding(mesh, spec)) if constrained else wide)

        compiled = jax.jit(f).lower(x).compile()
        y = compiled(x)
    assert oracle.error(y, oracle.softmax(2 * oracle.to64(x))) <= 1
    assert y.dtype == F
    of_whole_rows = {("softmax", (True, False, False), ("bfloat16", None, None))}
    state = ("logsumexp", (True, False, False), ("bfloat16", None, None))
    weights = ("logsumexp_vjp", (True, *[False] * 5), ("bfloat16", *["float32"] * 3, None, None))
    of_parts = {state, weights} if spec != P("data") else set()
    assert of_parts <= set(noting.told) <= of_whole_rows | of_parts
    assert {dtypes[0] for _, dtypes in noting.ran} == {"bfloat16"}
    assert collectives_of(compiled)[1] <= 64  # states of rows


@MESHES
@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P("data", "model")], ids=["rows", "columns", "both"])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("op", [softmax, logsumexp])
def test_shards_behind_a_factor(op, kind, spec, per_row):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))
    module, rows = Noting(), P(spec[0] if per_row else None)
    with kernels.plugged_in("softmax", "noting", lambda: module, "cpu", takes_factor=True), jax.set_mesh(mesh):
        x = jax.device_put(sample("bfloat16"), NamedSharding(mesh, spec))
        s = jax.device_put(jnp.linspace(-2, 1, 8)[:, None] if per_row else jnp.full((1, 1), 0.7), NamedSharding(mesh, rows))
        y = jax.jit(lambda x, s: op(x.astype(F) / s, axis=-1, implementation="noting"))(x, s)
    assert oracle.error(y, getattr(oracle, op.__name__)(oracle.to64(x) / oracle.to64(s), -1)) <= 1
    told = [(fused[0], dtypes[0]) for name, fused, dtypes in module.told if name == op.__name__]
    assert (False, "bfloat16") in told  # the source, and no product
    if spec == P("data"):
        assert set(told) == {(False, "bfloat16")}


@MESHES
@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P("data", "model")], ids=["rows", "columns", "both"])
def test_shards_of_a_loss_behind_a_factor(kind, spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))
    module, labels, told = kernels.Local("cross_entropy", "cpu"), np.arange(0, 128, 16), []
    module.reason = told.append
    with kernels.plugged_in("cross_entropy", "local", lambda: module, "cpu", takes_factor=True), jax.set_mesh(mesh):
        x, s = jax.device_put(sample("bfloat16"), NamedSharding(mesh, spec)), jnp.linspace(-2, 1, 8)[:, None]

        def f(x):
            return cross_entropy(x.astype(F) / s, labels, implementation="local")

        loss, gradient = jax.jit(lambda x: (f(x), jax.grad(lambda x: jnp.sum(f(x)))(x)))(x)
    truth = losses.cross_entropy(oracle.to64(x) / oracle.to64(s), labels)
    of_scores = truth.gradient(np.ones(8))
    assert oracle.error(loss, truth.loss) <= 1
    assert oracle.error(gradient, oracle.Truth(of_scores.value / oracle.to64(s), of_scores.budget / np.abs(s))) <= 1
    of_rows = [(problem.operands["x"].dtype.name, "divisor" in problem.operands) for problem in told]
    assert ("bfloat16", True) in of_rows
    assert spec != P("data") or set(of_rows) == {("bfloat16", True)}


@MESHES
@pytest.mark.parametrize("per_row", [False, True])
def test_shards_of_samples_behind_a_factor(kind, per_row):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))
    module, told, x = kernels.Local("top_k", "cpu"), [], sample("bfloat16")
    module.reason = told.append
    s = jnp.linspace(-2, 1, 8)[:, None] if per_row else jnp.full((1, 1), 0.7)

    def f(x, s):
        return categorical(jax.random.key(0), x.astype(F) / s)

    expected = jax.jit(f)(x, s)
    with kernels.plugged_in("top_k", "local", lambda: module, "cpu", takes_factor=True), jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        s = jax.device_put(s, NamedSharding(mesh, P("data") if per_row else P()))
        found = jax.jit(f)(x, s)
    np.testing.assert_array_equal(found, expected)
    assert {(problem.operands["x"].dtype.name, "divisor" in problem.operands) for problem in told} == {("bfloat16", True)}
    assert told[-1].operands["x"].shape == (2, 128)


@MESHES
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["rows", "columns"])
def test_gradients_of_chosen_entries_of_shards(kind, spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))
    ids = np.arange(0, 128, 16)

    def loss(x):
        y = log_softmax(x, implementation="xla")
        y = jax.sharding.reshard(y, P()) if kind == AxisType.Explicit else y
        return jnp.sum(along_rows(y, ids))

    x = sample("float32")
    with kernels.target(interpreted=True), jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(jax.device_put(x, NamedSharding(mesh, spec)))
    assert oracle.error(found, oracle.log_softmax_cotangent(x, np.eye(128)[ids], -1)) <= 1


def test_a_shard_map_that_the_user_writes(noting):
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        x = jax.device_put(sample("bfloat16"), NamedSharding(mesh, P("data")))
        mapped = jax.shard_map(lambda x: softmax((x + x).astype(F)), in_specs=P("data"), out_specs=P("data"))
        assert oracle.error(jax.jit(mapped)(x), oracle.softmax(2 * oracle.to64(x))) <= 1
    assert noting.told == [("softmax", (True, False, False), ("bfloat16", None, None))]


@pytest.mark.parametrize(
    "constant", [np.asarray([[1, 2 - 1j, 0.5j]], np.complex64), np.ones((1, 3), np.complex64)], ids=["any", "ones"]
)
@pytest.mark.parametrize("f", [softmax, logsumexp])
def test_a_complex_constant_is_looked_at(f, constant):
    z = np.asarray([[1 + 1j, 2, 3j]], np.complex64)
    np.testing.assert_allclose(jax.jit(lambda z: f(z * constant))(z), f(jnp.asarray(z * constant)), rtol=1e-5)
