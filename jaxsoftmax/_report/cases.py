"""The calls that `python -m jaxsoftmax --check` makes, with their inputs and the truth of their results.

A case is a call and its derivatives in one program. Sizes are small, as the truth is computed by NumPy on the host. Shapes are
ordinary ones and those that kernels treat apart: odd widths, one column, long rows, masks, ragged lengths.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from jaxsoftmax._report import truth
from jaxsoftmax._report.call import KERNELS
from jaxsoftmax._report.truth import EPS, TINY, Truth, half_unit, to64
from jaxsoftmax._report.truth import attention as attention_truth
from jaxsoftmax._report.truth import cross_entropy as losses_truth
from jaxsoftmax._report.truth import divergence as divergence_truth
from jaxsoftmax._report.truth import top_k as order
from jaxsoftmax.ops.attention import dropout

Inputs = Mapping[str, Any]  # arrays of NumPy by name; `cotangents` and `tangents` are trees of them
Ran = Mapping[str, str]  # the implementation that ran each primitive
Judge = Truth | Callable[[np.ndarray], float]  # the truth of a result, or a function that gives the fraction of its budget


@dataclass(frozen=True)
class Case:
    """A call that is checked.

    Attributes:
      op: the public function.
      dtype: the dtype of its main operand.
      shape: the shape of its main operand.
      what: its particularity, in words.
      options: arguments of the op beside the inputs.
      moving: the names of the inputs by which results are differentiated.
      inputs: makes the inputs, by name, as arrays of NumPy.
      judges: takes the implementations that ran, and the inputs, and returns the truth of each result of `build`.
      precision: JAX's default precision of products.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    what: str
    options: Mapping[str, Any]
    moving: tuple[str, ...]
    inputs: Callable[[], Inputs]
    judges: Callable[[Ran, Inputs], Sequence[Judge]]
    precision: str | None = None

    @property
    def name(self) -> str:
        """Name of the case, such as `softmax float32 64x1024 odd width`."""
        return " ".join(filter(None, (self.op, self.dtype, "x".join(map(str, self.shape)), self.what)))

    def build(self, implementation: str | None) -> Callable[[Inputs], list[Any]]:
        """Returns the program: a function from inputs to the call's results and their derivatives, if there are directions."""

        def run(arrays):
            op = getattr(jaxsoftmax if hasattr(jaxsoftmax, self.op) else jaxsoftmax.cache, self.op)
            fixed = {"implementation": implementation, **self.options, **arrays}
            cotangents, tangents = (fixed.pop(name, None) for name in ("cotangents", "tangents"))
            moving = {name: fixed.pop(name) for name in self.moving if name in fixed}

            def f(moving):
                results = jax.tree.leaves(op(**moving, **fixed))
                integers = [result for result in results if not jnp.issubdtype(result.dtype, jnp.inexact)]
                return results[: len(results) - len(integers)], integers

            with jax.default_matmul_precision(self.precision):
                if tangents is not None:
                    results, derivatives, integers = jax.jvp(f, (moving,), (tangents,), has_aux=True)
                elif cotangents is not None:
                    results, vjp, integers = jax.vjp(f, moving, has_aux=True)
                    gradients = vjp(cotangents)[0]
                    derivatives = [gradients[name] for name in moving]
                else:
                    results, integers, derivatives = *f(moving), []
            return [*results, *integers, *derivatives]

        return run


def all_cases() -> list[Case]:
    """Returns every case, in the order in which they run."""
    return [*_softmax_cases(), *_loss_cases(), *_attention_cases(), *_decoding_cases(), *_top_k_cases()]


def few_cases() -> list[Case]:
    """Returns one case of each public function, which run in seconds on a CPU."""
    return list({case.op: case for case in reversed(all_cases())}.values())[::-1]


def error(judge: Judge, result: np.ndarray) -> float:
    """Returns the largest fraction of its budget that a result uses."""
    return truth.error(result, judge) if isinstance(judge, Truth) else judge(result)


# Inputs.


def _numbers(shape: tuple[int, ...], dtype: str, kind: str = "", seed: int = 0) -> np.ndarray:
    """Returns random numbers: standard normals, or normals with numbers that are hard to sum."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(shape)
    sparse = (rng.random(shape) < 0.3) & (np.arange(shape[-1]) > 0)
    kinds: dict[str, Callable[[], np.ndarray]] = {
        "": lambda: normal,
        "outliers": lambda: np.where(rng.random(shape) < 0.02, 1e3, normal),
        "offset": lambda: 1e4 + normal,
        "some -inf": lambda: np.where(sparse, -np.inf, normal),
        "-inf": lambda: np.where(np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1)) % 3 == 1, -np.inf, normal),
        "ties": lambda: rng.integers(0, 5, shape).astype(np.float64),
    }
    return kinds[kind]().astype(jnp.dtype(dtype))


def _mask(shape: tuple[int, ...], seed: int = 3) -> np.ndarray:
    """Returns a mask that leaves six of ten entries, and none of the first row."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[0] = False
    return mask


def exactly(value: np.ndarray) -> Truth:
    """Returns the truth of a result that has no rounding error."""
    return Truth(to64(value), np.full(np.shape(value), TINY))


# Softmax, log_softmax, logsumexp.


def _softmax_cases() -> list[Case]:
    return [
        _rows("softmax", "float32", (64, 1024)),
        _rows("softmax", "bfloat16", (64, 1024)),
        _rows("softmax", "float16", (64, 1024)),
        _rows("softmax", "float32", (50, 1001), "outliers"),
        _rows("softmax", "bfloat16", (300, 127), "some -inf"),
        _rows("softmax", "bfloat16", (37, 1), what="one column"),
        _rows("softmax", "float32", (128, 513), what="where, rows without an entry", masked=True),
        _rows("softmax", "bfloat16", (16, 4096), "outliers", what="where", masked=True),
        _rows("softmax", "float16", (3, 50257)),
        _rows("softmax", "float32", (2, 300001), what="a long row"),
        _rows("softmax", "bfloat16", (4, 300, 64), what="along axis 1", axis=1),
        _rows("softmax", "float32", (64, 1024), what="forward mode", forward_mode=True),
        _rows("log_softmax", "float32", (64, 1000)),
        _rows("log_softmax", "bfloat16", (33, 50257), "outliers"),
        _rows("log_softmax", "float16", (128, 255), "some -inf"),
        _rows("log_softmax", "float32", (64, 1024), what="forward mode", forward_mode=True),
        _rows("logsumexp", "float32", (64, 1000), "offset"),
        _rows("logsumexp", "bfloat16", (300, 129), "-inf", what="rows of"),
        _rows("logsumexp", "float16", (7, 131072)),
    ]


def _rows(op: str, dtype: str, shape: tuple[int, ...], kind="", *, what="", axis=-1, masked=False, forward_mode=False) -> Case:
    """Values and a derivative of an op of rows: the vjp, or the jvp in `forward_mode`."""
    operand = "a" if op == "logsumexp" else "x"

    def inputs():
        of_result = tuple(np.delete(shape, axis)) if op == "logsumexp" else shape
        direction = np.random.default_rng(1).standard_normal(of_result).astype(jnp.dtype(dtype))
        directions = {"tangents": {operand: direction}} if forward_mode else {"cotangents": [direction]}
        return {operand: _numbers(shape, dtype, kind)} | directions | ({"where": _mask(shape)} if masked else {})

    def judges(ran, arrays):
        x, where = arrays[operand], arrays.get("where")
        direction = arrays["tangents"][operand] if forward_mode else arrays["cotangents"][0]
        value = getattr(truth, op)(x, axis, where)
        if op == "softmax":
            return [value, truth.softmax_derivative(x, direction, axis, where, saved=x.dtype)]
        return [value, getattr(truth, f"{op}_{'tangent' if forward_mode else 'cotangent'}")(x, direction, axis, where)]

    return Case(op, dtype, shape, f"{what} {kind}".strip(), {"axis": axis}, (operand,), inputs, judges)


# Losses.


def _loss_cases() -> list[Case]:
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "logits_soft_cap": 30.0}
    return [
        _losses("float32", (64, 1000)),
        _losses("bfloat16", (33, 50257), "outliers"),
        _losses("float16", (128, 255), what="ignore_index", ignore_index=3),
        _losses("bfloat16", (64, 1001), what="smoothing, z-loss, cap", **options),
        _losses("float32", (64, 513), what="where", masked=True),
        _linear("bfloat16", (128, 192, 576)),
        _linear("float32", (70, 64, 513)),
        _linear("bfloat16", (200, 128, 576), reduction="none"),
        _linear("float16", (130, 192, 264), reduction="none"),
        _divergences("float32", (64, 1000)),
        _divergences("bfloat16", (33, 50257), "outliers", p_scale=0.5, q_scale=0.5),
        _divergences("float16", (64, 513), what="where", masked=True),
        _divergences("float32", (64, 1000), op="js_divergence"),
        _divergences("bfloat16", (33, 50257), "outliers", op="js_divergence", weight=0.3, p_scale=0.5),
        _divergences("float16", (64, 513), op="js_divergence", what="where", masked=True),
    ]


def _labels(rows: int, classes: int) -> np.ndarray:
    """Returns labels, the first and the last class among them."""
    labels = np.random.default_rng(2).integers(0, classes, rows).astype(np.int32)
    labels[:2] = 0, classes - 1
    return labels


def _losses(dtype: str, shape: tuple[int, int], kind="", *, what="", masked=False, **options: Any) -> Case:
    """Losses of labels and the gradient of the logits."""

    def inputs():
        arrays: dict[str, Any] = {"logits": _numbers(shape, dtype, kind), "labels": _labels(*shape)}
        arrays["cotangents"] = [np.random.default_rng(1).standard_normal(shape[0]).astype(np.float32)]
        if masked:
            arrays["where"] = _mask(shape)
            arrays["where"][np.arange(1, shape[0]), arrays["labels"][1:]] = True
        return arrays

    def judges(ran, arrays):
        losses = losses_truth.cross_entropy(arrays["logits"], arrays["labels"], where=arrays.get("where"), **options)
        return [losses.loss, losses.gradient(arrays["cotangents"][0])]

    return Case("cross_entropy", dtype, shape, f"{what} {kind}".strip(), options, ("logits",), inputs, judges)


def _divergences(
    dtype: str, shape: tuple[int, int], kind="", *, what="", masked=False, op="kl_divergence", **options: Any
) -> Case:
    """Divergences of two softmaxes and the gradients of both arrays of logits."""

    def inputs():
        arrays: dict[str, Any] = {"p_logits": _numbers(shape, dtype, kind), "q_logits": _numbers(shape, dtype, kind, seed=1)}
        arrays["cotangents"] = [np.random.default_rng(1).standard_normal(shape[0]).astype(np.float32)]
        return arrays | ({"where": _mask(shape)} if masked else {})

    def judges(ran, arrays):
        names = {"p_scale": "scale", "q_scale": "y_scale"}
        renamed, where = {names.get(name, name): value for name, value in options.items()}, arrays.get("where")
        found = getattr(divergence_truth, op)(arrays["p_logits"], arrays["q_logits"], where=where, **renamed)
        return [found.value, *found.gradients(arrays["cotangents"][0])]

    words, moving = f"{what} {kind}".strip(), ("p_logits", "q_logits")
    return Case(op, dtype, shape, words, options, moving, inputs, judges)


def _linear(dtype: str, shape: tuple[int, int, int], reduction: str = "mean") -> Case:
    """The loss of a linear layer: each loss, or the mean with the gradients of hidden states and weight."""
    tokens, size, classes = shape

    def inputs():
        hidden = _numbers((tokens, size), dtype)
        weight = (np.random.default_rng(4).standard_normal((size, classes)) / math.sqrt(size)).astype(jnp.dtype(dtype))
        cotangents = {"cotangents": [np.float32(1)]} if reduction == "mean" else {}
        return {"hidden": hidden, "weight": weight, "labels": _labels(tokens, classes)} | cotangents

    def judges(ran, arrays):
        return _truth_of_linear(arrays, half_unit(dtype), with_gradients=reduction == "mean")

    what, options = "" if reduction == "mean" else "each loss", {"reduction": reduction}
    precision = "highest" if dtype == "float32" else None
    return Case("linear_cross_entropy", dtype, shape, what, options, ("hidden", "weight"), inputs, judges, precision)


def _truth_of_linear(arrays: Inputs, narrow: float, *, with_gradients: bool) -> list[Truth]:
    """Computes the truth from whole logits.

    A logit errs by its sum in float32, which tensor cores truncate, and by a rounding to the dtype where logits are in memory.
    The logits' gradient is rounded to the dtype too, and a sum of n products errs by n / 8 * 2^-24 of its absolute terms.
    """
    hidden, weight, labels = to64(arrays["hidden"]), to64(arrays["weight"]), arrays["labels"]
    scores, sizes = hidden @ weight, np.abs(hidden) @ np.abs(weight)
    off = 4 * EPS * np.sqrt(hidden.shape[1]) * sizes + narrow * np.abs(scores)
    exact = losses_truth.cross_entropy(scores, labels)
    losses = Truth(exact.loss.value, exact.loss.budget + 2 * np.max(off, 1))
    if not with_gradients:
        return [losses]
    ones = np.full(len(labels), 1 / len(labels))
    gradient, p = exact.gradient(ones), exact.rows.y
    of_logits = gradient.budget + p * (off + np.sum(p * off, 1, keepdims=True)) / len(labels)
    of_logits = of_logits + narrow * np.abs(gradient.value)

    def product(left: np.ndarray, right: np.ndarray, error: np.ndarray) -> Truth:
        terms = np.abs(left) @ np.abs(right)
        return Truth(left @ right, error + left.shape[1] / 8 * EPS * terms + 8 * EPS * terms + TINY)

    of_hidden = product(gradient.value, weight.T, of_logits @ np.abs(weight.T))
    of_weight = product(hidden.T, gradient.value, np.abs(hidden.T) @ of_logits)
    budget = np.mean(losses.budget) + 8 * EPS * np.mean(np.abs(losses.value))
    mean = Truth(np.asarray(np.mean(losses.value)), np.asarray(budget))
    return [mean, of_hidden, of_weight]


# Attention.


@dataclass(frozen=True)
class _Sizes:
    batch: int = 2
    length: int = 256
    keys: int = 256
    heads: int = 4
    key_heads: int = 4
    size: int = 64
    value_size: int | None = None

    @property
    def query(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.heads, self.size

    def arrays(self, dtype: str) -> dict[str, np.ndarray]:
        """Returns query, key and value. Some of their scores stand out."""
        rng = np.random.default_rng(0)
        of_keys = self.batch, self.keys, self.key_heads
        shapes = {"query": self.query, "key": (*of_keys, self.size), "value": (*of_keys, self.value_size or self.size)}
        return {name: (2 * rng.standard_normal(shape)).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}


def _attention_cases() -> list[Case]:
    rng = np.random.default_rng(5)
    odd, long = _Sizes(length=131, keys=197, key_heads=2), _Sizes(length=300, keys=300)
    segments = np.sort(rng.integers(0, 4, (2, 300)), -1).astype(np.int32)
    lengths = {"query_seq_lengths": np.array([131, 60], np.int32), "key_value_seq_lengths": np.array([197, 101], np.int32)}
    bias = (3 * rng.standard_normal((1, 4, 131, 197))).astype(np.float32)
    bias[..., 11] = -np.inf
    mask = _mask((2, 1, 131, 197))
    sinks = rng.standard_normal(4).astype(np.float32)
    return [
        _attention("bfloat16", _Sizes()),
        _attention("bfloat16", _Sizes(size=128), "causal", is_causal=True),
        _attention("float16", _Sizes(size=128), "causal", is_causal=True),
        _attention("float32", _Sizes(), "causal", is_causal=True),
        _attention("float32", odd, "GQA, odd lengths"),
        _attention("bfloat16", odd, "GQA, odd lengths"),
        _attention("bfloat16", _Sizes(size=256, heads=2, key_heads=2), "causal", is_causal=True),
        _attention("bfloat16", _Sizes(size=192, value_size=128, heads=2, key_heads=2), "values of 128", is_causal=True),
        _attention("float16", _Sizes(size=80, key_heads=1), "multi-query"),
        _attention("bfloat16", odd, "lengths", lengths),
        _attention("bfloat16", long, "window", local_window_size=(70, 0)),
        _attention("bfloat16", long, "segments", {"query_segment_ids": segments, "key_value_segment_ids": segments}),
        _attention("bfloat16", odd, "mask", {"mask": mask}),
        _attention("bfloat16", odd, "bias", {"bias": bias}),
        _attention("float16", odd, "sinks, soft cap", {"sinks": sinks}, logits_soft_cap=20.0),
        _attention("bfloat16", _Sizes(), "dropout", dropout_rate=0.3),
        _attention("bfloat16", _Sizes(size=128), "bits fixed", is_causal=True, deterministic_gradients=True),
        _attention("float32", odd, "lengths", lengths, gradients=False),
    ]


_MOVING = ("query", "key", "value", "bias", "sinks")
_NOT_OF_TRUTH = ("precision", "deterministic_gradients", "return_lse", "return_residual", "dropout_rng")
_SEED = 3
_PAGES = 40


def _attention(
    dtype: str, sizes: _Sizes, what="", extras: Inputs | None = None, *, gradients=True, cache="", page=0, **options: Any
) -> Case:
    """Output, log-sum-exp and, with `gradients`, the cotangents of all floating operands; `cache` and `page`: `_in_cache`."""
    is_wide = dtype == "float32"
    options |= {"precision": "high"} if is_wide else {}  # products of three bfloat16 ones, whatever runs
    options |= {"return_lse" if page else "return_residual": True}
    options |= {"dropout_rng": jax.random.key(_SEED)} if "dropout_rate" in options else {}

    def inputs():
        arrays = sizes.arrays(dtype) | dict(extras or {})
        if page or cache:
            return _in_cache(arrays, dtype, cache, page)
        rng = np.random.default_rng(7)
        out = *sizes.query[:3], sizes.value_size or sizes.size
        cotangents = rng.standard_normal(out).astype(jnp.dtype(dtype)), rng.standard_normal(out[:3]).astype(np.float32)
        return arrays | ({"cotangents": list(cotangents)} if gradients else {})

    def judges(ran, arrays):
        arrays = _out_of_cache(arrays)
        cotangents = arrays.pop("cotangents", None)
        arguments = {name: value for name, value in options.items() if name not in _NOT_OF_TRUTH}
        if rate := arguments.pop("dropout_rate", 0.0):
            arguments["kept"] = _kept(sizes, rate)
        arguments |= arrays | {"product": attention_truth.THREE_PRODUCTS if is_wide else 0.0}
        results = list(attention_truth.attention(**arguments))
        if cotangents is not None:
            dlse = np.where(np.isneginf(results[1].value), 0, cotangents[1])  # nothing moves an lse of -inf
            kernel = ran.get("dot_product_attention_vjp")
            tight = kernel == "mosaic" or (kernel in KERNELS and not is_wide)  # for which that budget was derived
            expected = attention_truth.cotangents(cotangents[0], dlse, **arguments, tight=tight)
            results += [expected[name] for name in _MOVING if name in arrays]
        return results

    op = "paged_attention" if page else "dot_product_attention"
    return Case(op, dtype, sizes.query, what, options, _MOVING, inputs, judges)


def _kept(sizes: _Sizes, rate: float) -> np.ndarray:
    """Returns the factors of dropout, `[batch, heads, T, S]`."""
    seeds = np.asarray(jax.random.bits(jax.random.key(_SEED), (sizes.batch, sizes.heads, 2), np.uint32))
    first, second = seeds[..., :1, None], seeds[..., 1:, None]
    rows = np.arange(sizes.length, dtype=np.uint32)[:, None]
    cols = np.arange(sizes.keys, dtype=np.uint32)
    keep: Any = dropout.keep
    return np.asarray(keep(first, second, rows, cols, rate)) / (1 - rate)


# Steps of decoding: keys and values in one array, in pages, and in 8 bits.


def _decoding_cases() -> list[Case]:
    step = _Sizes(batch=3, length=1, keys=700, heads=8, key_heads=2, size=128)
    paged = dataclasses.replace(step, keys=640)
    lengths = {"key_value_seq_lengths": np.array([700, 1, 333], np.int32)}
    offset = {"query_offset": np.array([695, 300, 77], np.int32)}
    five = _Sizes(batch=3, length=5, keys=700, heads=8, key_heads=2)
    return [
        _attention("bfloat16", step, "decoding, ragged", lengths, gradients=False),
        _attention("float16", five, "decoding, 5 queries", offset, gradients=False, is_causal=True),
        _attention("float32", step, "decoding, ragged", lengths, gradients=False),
        _attention("bfloat16", step, "decoding, int8", gradients=False, cache="int8"),
        _attention("bfloat16", step, "decoding, float8", gradients=False, cache="float8_e4m3fn"),
        _attention("bfloat16", paged, "pages of 16", gradients=False, page=16),
        _attention("float16", paged, "pages of 64", gradients=False, page=64),
        _attention("bfloat16", paged, "pages of 16, int8", gradients=False, page=16, cache="int8"),
    ]


def _bytes(shape: tuple[int, ...], cache: str, seed: int) -> np.ndarray:
    """Returns finite numbers of 8 bits: of float8 all that there are."""
    bits = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    numbers = bits.view(jnp.dtype(cache))
    return np.where(np.isnan(numbers.astype(np.float32)), np.zeros_like(numbers), numbers)


def _in_cache(arrays: Inputs, dtype: str, cache: str, page: int) -> dict[str, np.ndarray]:
    """Returns the operands of a step of decoding with keys and values in the dtype `cache`, in pages in any order, or both."""
    batch, keys, heads, size = arrays["key"].shape
    rng = np.random.default_rng(0)
    operands = {"query": arrays["query"], "key_value_seq_lengths": np.array([keys, 0 if page else 1, 333], np.int32)}
    shape = (_PAGES, page, heads, size) if page else (batch, keys, heads, size)
    for seed, name in enumerate(("key", "value")):
        normal = 2 * rng.standard_normal(shape)
        operands[f"{name}_pages" if page else name] = _bytes(shape, cache, seed) if cache else normal.astype(jnp.dtype(dtype))
        if cache:
            # Powers of two, with which products are exact in 16 bits, by which the cache holds about standard numbers.
            least = -7 if cache == "int8" else -8
            scale = 2.0 ** np.random.default_rng(seed).integers(least, least + 3, heads)
            operands[f"{name}_scale"] = scale.astype(np.float32)
    return operands | ({"page_table": rng.integers(0, _PAGES, (batch, keys // page)).astype(np.int32)} if page else {})


def _out_of_cache(operands: Inputs) -> dict[str, np.ndarray]:
    """Returns operands whose keys and values are neither in pages nor in 8 bits."""
    arrays = dict(operands)
    table = arrays.pop("page_table", None)
    for name in ("key", "value"):
        if table is not None:
            array = arrays.pop(f"{name}_pages")[table]
            arrays[name] = array.reshape(len(table), -1, *array.shape[-2:])
        if (scale := arrays.pop(f"{name}_scale", None)) is not None:
            arrays[name] = to64(arrays[name]) * to64(scale)[:, None]
    return arrays


# The largest entries, their weights, samples.


def _top_k_cases() -> list[Case]:
    return [
        _largest("float32", (64, 1000), 8),
        _largest("bfloat16", (5, 50257), 50, "ties"),
        _largest("float16", (33, 4097), 3, "some -inf"),
        _weights("float32", (64, 1000), 8, "all"),
        _weights("bfloat16", (300, 64), 8, "selected"),
        _weights("float16", (33, 50257), 50, "all"),
        _samples("float32", (16, 1000)),
        _samples("bfloat16", (5, 50257), top_k=50),
        _samples("float16", (16, 4097), top_p=0.9, temperature=0.7),
        _samples("float32", (16, 32000), min_p=0.1),
    ]


def _largest(dtype: str, shape: tuple[int, int], k: int, kind: str = "") -> Case:
    """The largest entries and their indices, bit for bit."""

    def judges(ran, arrays):
        return [exactly(expected) for expected in order.top_k(arrays["operand"], k)]

    words = f"k={k} {kind}".strip()
    return Case("top_k", dtype, shape, words, {"k": k}, (), lambda: {"operand": _numbers(shape, dtype, kind)}, judges)


def _weights(dtype: str, shape: tuple[int, int], k: int, normalize: Any) -> Case:
    """The largest weights of a softmax, their indices, and the gradient of the logits."""

    def inputs():
        cotangent = np.random.default_rng(1).standard_normal((shape[0], k)).astype(jnp.dtype(dtype))
        return {"logits": _numbers(shape, dtype), "cotangents": [cotangent]}

    def judges(ran, arrays):
        x = arrays["logits"]
        indices = order.top_k(x, k)[1]
        where = np.zeros(x.shape, bool)
        np.put_along_axis(where, indices, True, -1)
        where = where if normalize == "selected" else None
        whole = truth.softmax(x, -1, where)
        weights = Truth(*(np.take_along_axis(array, indices, -1) for array in (whole.value, whole.budget)))
        direction = np.zeros(x.shape)
        np.put_along_axis(direction, indices, to64(arrays["cotangents"][0]), -1)
        return [weights, exactly(indices), truth.softmax_derivative(x, direction, -1, where, saved=x.dtype)]

    options = {"k": k, "normalize": normalize}
    return Case("softmax_top_k", dtype, shape, f"k={k} {normalize}", options, ("logits",), inputs, judges)


_APART = 1e-3  # what rounding of the noise in float32 may change in the sum of a score and its noise


def _samples(dtype: str, shape: tuple[int, int], **options: Any) -> Case:
    """Samples of a key: the entry with the largest sum of score and noise, or one whose sum is as large up to rounding."""
    key = jax.random.key(_SEED)

    def judges(ran, arrays):
        return [samples_of(key, arrays["logits"], np.arange(shape[0]), **options)]

    words = " ".join(f"{name}={value}" for name, value in options.items())
    more = options | {"key": key}
    return Case("categorical", dtype, shape, words, more, (), lambda: {"logits": _numbers(shape, dtype)}, judges)


def samples_of(key: Any, x: np.ndarray, rows: np.ndarray, **options: Any) -> Callable[[np.ndarray], float]:
    """Returns the judge of samples of logits whose rows have these indices. Rows that rounding may filter otherwise pass."""
    kept = order.filtered(x, **options)
    words = np.asarray(jax.random.bits(key, (2,), np.uint32))
    noise = order.noise(words, rows[:, None], np.arange(x.shape[-1]))
    sums = np.where(kept.weights > 0, to64(x) / options.get("temperature", 1.0) + noise, -np.inf)

    def judge(samples: np.ndarray) -> float:
        is_inside = (samples >= 0) & (samples < x.shape[-1])
        drawn = np.take_along_axis(sums, np.where(is_inside, samples, 0)[:, None], -1)[:, 0]
        missed = np.where(is_inside, (np.max(sums, -1) - drawn) / _APART, np.inf)
        return float(np.max(np.where(kept.doubtful.any(-1), 0, missed)))

    return judge
