"""What a wrong call says, and what an import and an eager call do no more often than they have to."""

import functools
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxsoftmax
from jaxsoftmax._core import target as targets
from jaxsoftmax.flax import attention_fn

from ..support import cases
from ..support.compilations import compilations

pytestmark = pytest.mark.usefixtures("hollow_kernels")

X = np.zeros((2, 3), np.float32)


class Tag:
    """Something that is no array."""


BAD = [
    # arguments, error, and what its message must name
    ({"axis": 2}, ValueError, ["axis 2", "2 dimensions", "-2 to 1"]),
    ({"axis": -3}, ValueError, ["axis -3", "-2 to 1"]),
    ({"axis": (0, 0)}, ValueError, ["axis", "repeated", "(0, 0)"]),
    ({"axis": (0, -2)}, ValueError, ["axis", "repeated", "(0, -2)"]),
    ({"axis": 1.0}, TypeError, ["axis", "1.0", "int"]),
    ({"axis": "last"}, TypeError, ["axis", "'last'", "int"]),
    ({"where": np.ones((2, 3), np.int32)}, TypeError, ["where", "boolean", "int32"]),
    ({"where": [True, False, True]}, TypeError, ["where must be a boolean array", "list"]),
    ({"where": np.ones((2, 3), np.float32)}, TypeError, ["where", "boolean", "float32"]),
    ({"where": np.ones((4,), bool)}, ValueError, ["where", "(4,)", "(2, 3)", "broadcast"]),
    ({"where": [True, False, True]}, TypeError, ["where", "list"]),
    ({"implementation": "cuda"}, ValueError, ["implementation", "'cuda'", "'xla'", "None"]),
    ({"implementation": ["xla"]}, ValueError, ["implementation", "['xla']", "None"]),
]
BAD_SCALES = [
    ({"axis": 1, "scale": np.ones(3, np.float32)}, ValueError, ["scale", "scalar", "rows of shape (2,)", "(3,)"]),
    ({"axis": 0, "scale": np.ones(2, np.float32)}, ValueError, ["scale", "scalar", "rows of shape (3,)", "(2,)"]),
    ({"axis": 1, "scale": np.ones((1, 1), np.float32)}, ValueError, ["scale", "scalar", "(1, 1)"]),
    ({"axis": 1, "scale": np.ones((2, 1), np.float32)}, ValueError, ["scale", "scalar", "(2, 1)"]),
    ({"axis": None, "scale": np.ones(1, np.float32)}, ValueError, ["scale", "scalar", "rows of shape ()", "(1,)"]),
    ({"scale": np.array(1e300)}, ValueError, ["scale must be finite in float32", "1e+300"]),
    ({"scale": True}, TypeError, ["scale", "real", "bool"]),
    ({"scale": 1j}, TypeError, ["scale", "real", "complex"]),
    ({"axis": 1, "scale": np.ones(2, bool)}, TypeError, ["scale", "one for each row", "bool"]),
    ({"axis": 1, "scale": np.ones(2, np.complex64)}, TypeError, ["scale", "one for each row", "complex"]),
    ({"scale": [1.0, 2.0]}, TypeError, ["scale", "list"]),
    ({"scale": "big"}, TypeError, ["scale", "str"]),
]
BAD_DTYPES = [
    ({"dtype": jnp.int32}, TypeError, ["dtype", "floating", "int32"]),
    ({"dtype": "half of it"}, TypeError, ["dtype", "floating", "half of it"]),
    ({"dtype": jnp.complex64}, TypeError, ["dtype", "floating", "complex64"]),
]


def check(name, x, arguments, error, words):
    for f in (getattr(jaxsoftmax, name), jax.jit(functools.partial(getattr(jaxsoftmax, name), **arguments))):
        with pytest.raises(error) as raised:
            f(x, **({} if f is not getattr(jaxsoftmax, name) else arguments))
        assert str(raised.value).startswith(f"{name}:")
        for word in words:
            assert word in str(raised.value)


@pytest.mark.parametrize(("arguments", "error", "words"), BAD, ids=cases.ident)
@pytest.mark.parametrize("name", cases.OPS)
def test_bad_arguments_are_named(name, arguments, error, words):
    check(name, X, arguments, error, words)


@pytest.mark.parametrize(("arguments", "error", "words"), BAD_SCALES, ids=cases.ident)
@pytest.mark.parametrize("name", cases.OPS)
def test_bad_scales_are_named(name, arguments, error, words):
    check(name, X, arguments, error, words)
    if name == "logsumexp":
        check(name, X, arguments | {"b": np.float32(2)}, error, words)


@pytest.mark.parametrize(("arguments", "error", "words"), BAD_DTYPES, ids=cases.ident)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_bad_dtypes_are_named(name, arguments, error, words):
    check(name, X, arguments, error, words)


@pytest.mark.parametrize(
    ("x", "words"),
    [([1.0, 2.0], ["list"]), (None, ["NoneType"]), ("text", ["str"]), (Tag(), ["Tag"]), (np.array(["a"]), ["<U1"])],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", cases.OPS)
def test_what_is_no_array_of_numbers(name, x, words):
    with pytest.raises(TypeError) as raised:
        getattr(jaxsoftmax, name)(x)
    for word in [f"{name}: {'a' if name == 'logsumexp' else 'x'} must be", *words]:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_bool_is_refused(name):
    check(name, np.ones((2, 3), bool), {}, TypeError, ["x must be", "bool"])


def test_keys_are_refused():
    with pytest.raises(TypeError, match="x must be an array of numbers"):
        jaxsoftmax.softmax(jax.random.split(jax.random.key(0), 3))


def test_no_axis_of_a_scalar():
    check("softmax", 3.0, {"axis": -1}, ValueError, ["axis -1", "0 dimensions"])


def test_factors_that_do_not_broadcast():
    with pytest.raises(ValueError, match=r"logsumexp: b must broadcast with a, got shapes \(4,\) and \(2, 3\)"):
        jaxsoftmax.logsumexp(X, b=np.ones(4, np.float32))
    with pytest.raises(TypeError, match="b must be an array of numbers, got list"):
        jaxsoftmax.logsumexp(X, b=[1.0])
    with pytest.raises(ValueError, match="implementation must be None or one of 'mosaic', 'triton', 'xla', got 'cuda'"):
        jaxsoftmax.logsumexp(X, b=np.float32(1), implementation="cuda")


def test_functions_of_jax_may_be_replaced_by_ours(monkeypatch):
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
    calls = [functools.partial(getattr(jaxsoftmax, name), q) for name in cases.OPS]
    calls += [lambda: jaxsoftmax.logsumexp(q, b=2 * q), lambda: jaxsoftmax.logsumexp(q, return_sign=True)]
    calls += [lambda: jaxsoftmax.dot_product_attention(q, q, q), lambda: attention_fn(q, q, q)]
    calls += [lambda: attention_fn(q, q, q, module=SimpleNamespace(sow=lambda *_: None))]
    expected = [f() for f in calls]
    for module in (jax.nn, jax.scipy.special, linen, nnx):
        for name in {"dot_product_attention", *cases.OPS} & set(dir(module)):
            flax_attention = module in (linen, nnx) and name == "dot_product_attention"
            monkeypatch.setattr(module, name, attention_fn if flax_attention else getattr(jaxsoftmax, name))
    assert jax.nn.logsumexp is jaxsoftmax.logsumexp
    jax.tree.map(np.testing.assert_array_equal, [f() for f in calls], expected)


def test_explain_knows_the_platforms():
    with pytest.raises(ValueError, match="platform must be one of cpu, cuda, rocm, tpu, got 'xpu'"):
        jaxsoftmax.explain(jaxsoftmax.softmax, X, platform="xpu")
    for platform, name in (("gpu", "cuda"), ("tpu", "tpu"), (None, {"gpu": "cuda"}.get(jax.default_backend(), "cpu"))):
        assert jaxsoftmax.explain(jaxsoftmax.softmax, X, platform=platform).platform == name


NO_GPU = pytest.mark.skipif(jax.default_backend() == "gpu", reason="JAX sees a GPU")


@NO_GPU
def test_explain_says_which_gpu_it_assumes():
    explanation = jaxsoftmax.explain(jaxsoftmax.softmax, X, platform="cuda")
    assert explanation.is_assumed
    assert explanation.gpu == explanation[0].gpu == "any GPU of compute capability 9.0 (H100, H200, GH200)"
    assert str(explanation).splitlines()[0] == f"on cuda, {explanation.gpu}, assumed as JAX sees none; gpu= names another:"
    nothing = str(jaxsoftmax.explain(jnp.sum, X, platform="cuda"))
    assert nothing == f"on cuda, {explanation.gpu}, assumed as JAX sees none; gpu= names another: no jaxsoftmax op"


GPUS = {
    "a100": ("A100 (compute capability 8.0, 108 multiprocessors)", False),
    "RTX 4090": ("RTX4090 (compute capability 8.9, 128 multiprocessors)", False),
    "h100": ("H100 (compute capability 9.0, 132 multiprocessors)", True),
    "b200": ("B200 (compute capability 10.0, 148 multiprocessors)", False),
    "8.6": ("any GPU of compute capability 8.6 (RTX3090)", False),
    (9, 0): ("any GPU of compute capability 9.0 (H100, H200, GH200)", True),
    (7, 5): ("any GPU of compute capability 7.5", False),
}


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_explain_takes_a_gpu_that_need_not_be_there(gpu):
    words, has_mosaic = GPUS[gpu]
    for platform in (None, "cuda", "gpu"):
        explanation = jaxsoftmax.explain(jaxsoftmax.softmax, X, gpu=gpu, platform=platform)
        assert (explanation.platform, explanation.gpu, explanation.is_assumed) == ("cuda", words, False)
        assert explanation[0].gpu == words
        assert str(explanation).startswith(f"on cuda, {words}:\n")
        assert (explanation[0].implementation == "mosaic") == has_mosaic
    assert jaxsoftmax.explain(jaxsoftmax.softmax, X, platform="cpu").gpu is None


# KiB of shared memory that a block of threads can have. Source: CUDA C++ Programming Guide, table of technical specifications.
SHARED = {"a100": 163} | dict.fromkeys(("h100", "h200", "gh200", "b200"), 227)
SHARED |= dict.fromkeys(("l4", "l40s", "rtx3090", "rtx4090", "rtx5090"), 99)


def test_each_gpu_that_explain_names_is_known():
    assert set(SHARED) == set(targets.GPUS)
    for name, (capability, multiprocessors) in targets.GPUS.items():
        target = targets.named("explain", name)
        assert (target.compute_capability, target.multiprocessors) == (capability, multiprocessors)
        assert target.shared_memory == SHARED[name] << 10
        assert f'"{name}"' in jaxsoftmax.explain.__doc__


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gpu": "h800"}, ValueError, r"gpu must be one of a100, .*, rtx5090 or a compute capability such as .*, got 'h800'"),
        ({"gpu": 8.0}, ValueError, r"gpu must be one of a100, .*, got 8.0"),
        ({"gpu": (9,)}, ValueError, r"gpu must be one of a100, .*, got \(9,\)"),
        ({"gpu": (-9, 0)}, ValueError, r"gpu must be one of a100, .*, got \(-9, 0\)"),
        ({"gpu": ("9", 0)}, TypeError, r"gpu\[0\] must be a concrete integer, got '9'"),
        ({"gpu": "a100", "platform": "cpu"}, ValueError, "gpu must be None on platform cpu, got 'a100'"),
        ({"gpu": "a100", "platform": "tpu"}, ValueError, "gpu must be None on platform tpu, got 'a100'"),
    ],
)
def test_explain_refuses_what_is_no_gpu(options, error, words):
    with pytest.raises(error, match=f"^explain: {words}"):
        jaxsoftmax.explain(jaxsoftmax.softmax, X, **options)


def test_explain_traces_types_that_are_given_by_name():
    where = jax.ShapeDtypeStruct((2, 3), bool)
    (decision,) = jaxsoftmax.explain(jaxsoftmax.softmax, X, axis=0, where=where, platform="cpu")
    assert decision.operands == ("float32[2,3]", "bool[2,3]")


@pytest.mark.usefixtures("x64")
def test_a_scale_of_float64_must_fit_the_arithmetic():
    for scale in (np.array(1e39), jnp.float64(1e39), np.float64(1e39)):
        with pytest.raises(ValueError, match="softmax: scale must be finite in float32, got 1e\\+39"):
            jaxsoftmax.softmax(X, scale=scale)
        jaxsoftmax.softmax(X, scale=scale, dtype=jnp.float64)
    assert np.isnan(jaxsoftmax.softmax(X, scale=jnp.float64(np.inf))).all()


def test_explain_finds_every_op_in_order():
    @jax.jit
    def attend(x):
        return jaxsoftmax.softmax(x) @ x.T

    def f(x):
        y = jax.lax.fori_loop(0, 3, lambda _, c: jaxsoftmax.log_softmax(c), attend(x))
        return jnp.sum(jaxsoftmax.logsumexp(y, axis=-1))

    found = jaxsoftmax.explain(f, jax.ShapeDtypeStruct((5, 3), jnp.float32), platform="cpu")
    assert [d.primitive for d in found] == ["softmax", "log_softmax", "logsumexp"]
    assert [d.operands for d in found] == [("float32[5,3]",), ("float32[5,5]",), ("float32[5,5]",)]
    assert len(jaxsoftmax.explain(jax.grad(f), X, platform="cuda")) > 3
    assert len(jaxsoftmax.explain(jaxsoftmax.softmax, X, axis=0, implementation="xla", platform="cuda")) == 1
    again = jaxsoftmax.explain(f, jax.ShapeDtypeStruct((5, 3), jnp.float32), platform="cpu")
    assert again == found, "a lowering that is cached must be explained too"
    assert str(found).splitlines()[0] == "on cpu:"
    assert "softmax" in str(found)
    assert "-> xla" in str(found)
    assert str(jaxsoftmax.explain(jnp.sum, X, platform="cpu")) == "on cpu: no jaxsoftmax op"


@pytest.mark.parametrize("name", [*cases.OPS, "dot_product_attention"])
def test_explain_and_errors_call_an_op_by_the_name_of_its_function(name):
    f = getattr(jaxsoftmax, name)
    operands = [np.ones((1, 4, 2, 8), np.float32)] * (3 if name == "dot_product_attention" else 1)
    gradient = jax.grad(lambda *operands: jnp.sum(f(*operands)))
    first, *others = [d.primitive for d in jaxsoftmax.explain(gradient, *operands, platform="cpu")]
    assert first == name
    assert others
    assert all(other.startswith(f"{name}_") for other in others)
    with pytest.raises(NotImplementedError, match=f"^{name}: implementation='mosaic' cannot run: it runs on cuda, not on cpu"):
        jaxsoftmax.explain(f, *operands, implementation="mosaic", platform="cpu")


@pytest.mark.parametrize("name", cases.OPS)
def test_eager_calls_compile_once_for_a_shape(name):
    f = functools.partial(getattr(jaxsoftmax, name), axis=-1)
    x = jnp.ones((3, 11), jnp.float32)
    jax.block_until_ready(f(x))
    with compilations() as compiled:
        for _ in range(3):
            f(x + 1)
            f(np.ones((3, 11), np.float32))
    assert not [message for message in compiled if name in message]


def test_compilations_would_be_seen():
    """The listener of the test above hears a shape that is new."""
    with compilations() as compiled:
        jaxsoftmax.softmax(jnp.ones((3, 12), jnp.float32))
    assert [message for message in compiled if "softmax" in message]


def test_what_turns_into_an_array_is_one():
    class Parameter:
        dtype = np.dtype(np.float32)

        def __jax_array__(self):
            return jnp.arange(3.0, dtype=jnp.float32)

    np.testing.assert_array_equal(jaxsoftmax.softmax(Parameter()), jaxsoftmax.softmax(np.arange(3, dtype=np.float32)))


def test_import_loads_no_module_that_only_some_calls_need():
    lazy = ("flax", "triton", "jax_triton", "jax.experimental.mosaic")
    script = f"import jaxsoftmax, sys; print([name for name in {lazy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_public_names_have_docstrings():
    for name in jaxsoftmax.__all__:
        assert len(getattr(jaxsoftmax, name).__doc__) > 80
