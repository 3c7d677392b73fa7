"""Every kernel under `jax_enable_x64`: Python's numbers are float64 and int64 there, and no kernel takes those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

from ..support import kernels, triton_kernels

pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(0)
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.PRNGKey(0)}


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


half, mask, ints = (functools.partial(shaped, dtype=dtype) for dtype in ("bfloat16", "bool", "int64"))
HEADS = half(2, 256, 4, 64), half(2, 256, 2, 64), half(2, 256, 2, 64)
LARGE = half(2, 256, 2, 256), half(2, 256, 2, 256), half(2, 256, 2, 256)
CACHE = shaped(2, 4096, 2, 64, dtype="int8")
PAGES = shaped(64, 64, 2, 64, dtype="int8")
EVERYTHING = {
    "mask": mask(2, 1, 256, 256),
    "bias": shaped(1, 4, 256, 256),
    "sinks": shaped(4),
    "query_seq_lengths": ints(2),
    "key_value_seq_lengths": ints(2),
    "query_segment_ids": shaped(2, 256, dtype="int32"),
    "key_value_segment_ids": shaped(2, 256, dtype="int32"),
}
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-4, "logits_soft_cap": 30.0}

# By name: a public function, its operands in order, those that it takes by name, and its options.
CALLS = {
    "softmax": ("softmax", [shaped(1024, 256)], {}, {}),
    "softmax, long": ("softmax", [shaped(4, 2**20)], {"where": mask(4, 2**20), "scale": shaped()}, {}),
    "log_softmax, axis": ("log_softmax", [shaped(8, 512, 256)], {"where": mask(8, 512, 256)}, {"axis": 1, "scale": 0.8}),
    "logsumexp": ("logsumexp", [half(64, 50257)], {"where": mask(1, 50257)}, {"axis": -1}),
    "cross_entropy": ("cross_entropy", [half(64, 50257), ints(64)], {}, LOSS | {"return_lse": True}),
    "cross_entropy, probabilities": ("cross_entropy", [shaped(64, 1000), shaped(64, 1000)], {"where": mask(64, 1000)}, LOSS),
    "linear_cross_entropy": ("linear_cross_entropy", [half(256, 128), half(128, 4096), ints(256)], {}, {}),
    "linear_cross_entropy, options": ("linear_cross_entropy", [half(256, 128), half(128, 4096), ints(256)], {}, LOSS),
    "attention": ("dot_product_attention", HEADS, {}, {"is_causal": True, "deterministic_gradients": True}),
    "attention, everything": (
        "dot_product_attention",
        HEADS,
        EVERYTHING,
        DROPOUT | {"logits_soft_cap": 3.0, "local_window_size": (30, 5), "return_residual": True, "scale": 0.3},
    ),
    "attention, large heads": ("dot_product_attention", LARGE, {"mask": mask(2, 1, 256, 256)}, {"fully_masked_rows": "mean"}),
    "attention, float32": ("dot_product_attention", [shaped(2, 256, 2, 64)] * 3, {}, {"local_window_size": 30}),
    "decoding": ("dot_product_attention", [half(2, 1, 16, 64), half(2, 4096, 2, 64), half(2, 4096, 2, 64)], {}, {}),
    "decoding, int8": (
        "dot_product_attention",
        [half(2, 1, 16, 64), CACHE, CACHE],
        {"key_scale": shaped(2), "value_scale": shaped(2), "key_value_seq_lengths": ints(2)},
        {"logits_soft_cap": 5.0},
    ),
    "pages": (
        "paged_attention",
        [half(2, 1, 16, 64), PAGES, PAGES, ints(2, 16), ints(2)],
        {"key_scale": shaped(64, 2), "value_scale": shaped(64, 2)},
        {},
    ),
    "top_k": ("top_k", [half(64, 50257)], {"where": mask(64, 50257)}, {"k": 50}),
    "top_k, int32": ("top_k", [shaped(64, 5000, dtype="int32")], {}, {"k": 50}),
    "top_k, short rows": ("top_k", [shaped(1000, 64)], {}, {"k": 8}),
    "softmax_top_k": ("softmax_top_k", [shaped(64, 5000)], {}, {"k": 4, "scale": 0.8, "return_lse": True}),
    "softmax_top_k, short rows": ("softmax_top_k", [half(1000, 64)], {}, {"k": 8, "return_lse": True}),
    "softmax_top_k, selected": ("softmax_top_k", [half(1000, 64)], {}, {"k": 8, "normalize": "selected"}),
    "softmax_top_k, where": ("softmax_top_k", [shaped(64, 5000)], {"where": mask(64, 5000), "scale": shaped()}, {"k": 8}),
    "categorical": ("categorical", [KEY, half(64, 50257)], {}, {"return_log_prob": True}),
    "categorical, top_k": (
        "categorical",
        [KEY, half(64, 50257)],
        {},
        {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "return_log_prob": True},
    ),
    "categorical, top_p": (
        "categorical",
        [KEY, shaped(64, 5000)],
        {"temperature": shaped(64), "top_p": shaped(64), "min_p": shaped(64)},
        {"return_log_prob": True},
    ),
    "categorical, min_p": ("categorical", [KEY, half(3, 1000)], {}, {"temperature": 0.8, "min_p": 0.1}),
}
QUICK = {
    "softmax, long": "softmax_forward_mosaic softmax_jacobian_mosaic",
    "log_softmax, axis": "log_softmax_forward_mosaic log_softmax_vjp_mosaic",
    "cross_entropy": "cross_entropy_forward_mosaic cross_entropy_vjp_mosaic",
    "linear_cross_entropy": "linear_cross_entropy_weights_mosaic linear_cross_entropy_gradient_mosaic",
    "attention, everything": "attention_forward_mosaic attention_backward_mosaic",
    "decoding, int8": "attention_forward_mosaic",
    "pages": "attention_forward_mosaic",
    "top_k": "top_k_mosaic",
    "softmax_top_k": "top_k_mosaic logsumexp_vjp_mosaic",
    "softmax_top_k, short rows": "top_k_of_short_rows_mosaic softmax_top_k_vjp_of_short_rows_mosaic",
    "categorical, top_k": "top_k_mosaic logsumexp_vjp_mosaic",
    "categorical, top_p": "categorical_mosaic categorical_check_mosaic categorical_again_mosaic logsumexp_vjp_mosaic",
}
HAS_GRADIENT = [name for name in CALLS if not name.startswith(("decoding", "pages", "top_k, int32", "categorical, min_p"))]


def lowered(name, is_differentiated, implementation="mosaic"):
    """The program of a call, or of its gradient in all that is floating."""
    return kernels.lowered_for_cuda(program(name, is_differentiated, implementation), leaves_of(name))


def leaves_of(name):
    _, operands, named, _ = CALLS[name]
    return jax.tree.leaves((operands, named))


def program(name, is_differentiated, implementation="mosaic"):
    """A call, or its gradient in all that is floating, as a function of its leaves."""
    function, operands, named, options = CALLS[name]
    function = functools.partial(
        getattr(jaxsoftmax, function, None) or getattr(jaxsoftmax.cache, function), implementation=implementation, **options
    )
    leaves, tree = jax.tree.flatten((operands, named))
    moving = [index for index, a in enumerate(leaves) if is_differentiated and jnp.issubdtype(a.dtype, jnp.floating)]

    def results(moved, leaves):
        given = dict(enumerate(leaves)) | dict(zip(moving, moved, strict=True))
        operands, named = jax.tree.unflatten(tree, given.values())
        return function(*operands, **named)

    def gradients(leaves):
        return jax.grad(lambda moved: total(results(moved, leaves)))([leaves[index] for index in moving])

    return gradients if is_differentiated else functools.partial(results, [])


def total(results):
    return sum(
        jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in jax.tree.leaves(results) if jnp.issubdtype(a.dtype, jnp.floating)
    )


@pytest.mark.parametrize(("name", "names"), QUICK.items(), ids=QUICK)
def test_kernels_lower_in_double_precision(name, names):
    assert kernels.kernel_names(lowered(name, name in HAS_GRADIENT)) == names.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_differentiated"),
    [(name, which) for name in CALLS for which in (False, True) if not which or name in HAS_GRADIENT],
)
def test_every_call_lowers_in_double_precision(name, is_differentiated):
    kernels.assert_ran(lowered(name, is_differentiated), "mosaic")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("name", "is_differentiated"),
    [(name, which) for name in QUICK for which in (False, True) if not which or name in HAS_GRADIENT],
)
def test_native_results_are_those_of_single_precision(name, is_differentiated):
    """To the bit, except gradients of attention, which blocks add up in any order."""
    rng = np.random.default_rng(0)

    def array(kind):
        if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
            return jax.random.key(3)
        if kind.dtype == bool:
            return rng.random(kind.shape) < 0.8
        if jnp.issubdtype(kind.dtype, jnp.floating):
            return np.asarray(np.abs(rng.standard_normal(kind.shape)), kind.dtype)
        return rng.integers(1, 16, kind.shape).astype(kind.dtype)  # lengths, labels, pages and segments that there are

    leaves = list(map(array, leaves_of(name)))
    f = program(name, is_differentiated)
    found = jax.tree.leaves(jax.jit(f)(leaves))
    with jax.enable_x64(False):
        expected = jax.tree.leaves(jax.jit(lambda leaves: f(leaves))(leaves))
    is_summed_in_any_order = is_differentiated and name.startswith("attention")
    for ours, other in zip(found, expected, strict=True):
        ours, other = np.asarray(ours), np.asarray(other)
        if is_summed_in_any_order:
            np.testing.assert_allclose(
                np.float32(ours), np.float32(other), rtol=1e-2, atol=1e-4 * np.abs(np.float32(other)).max()
            )
        else:
            np.testing.assert_array_equal(ours, other)


@triton_kernels.needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in HAS_GRADIENT if not name.startswith(("linear", "top_k", "softmax_top_k", "cat"))]
)
def test_triton_kernels_lower_in_double_precision(name):
    assert "triton_kernel_call" in lowered(name, True, implementation="triton")


@pytest.mark.parametrize("way", ["ring", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_kernels_of_shards_lower_in_double_precision(way):
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        x = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x")))
        attend = functools.partial(jaxsoftmax.dot_product_attention, parallel=jaxsoftmax.ContextParallel(way), is_causal=True)
        text = kernels.lowered_for_cuda(jax.grad(lambda x: total(attend(x, x, x))), x)
    kernels.assert_ran(text, "mosaic")
