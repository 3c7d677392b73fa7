"""The cells of entropies, of log-probabilities of chosen classes, and of divergences, from one read of the logits.

`bytes` are those of the logits, which forward reads once; backward reads them once more, and writes as many. Those of ids and
results are not counted. A gradient is that for a cotangent of each result. `ppo` is the loss of PPO from logits, the mean over
rows of a clipped ratio and an entropy, with its gradient. `kl` and `js` are divergences of two arrays of logits, with the
gradient by those that the option `by` names; they read both arrays in each pass, and write the gradients. `js` reads rows that
no cluster holds twice forward, which `bytes` do not count.

Cells with the option `divided` are ops of `logits / T`, with a T for each row: a kernel takes the quotient in. Beside them
stand the same in `jax.nn`, and ours of the logits alone. A sample is not compared with one of the logits alone, which differs.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from benchmarks import top_k
from benchmarks.cells import OURS, Cell, Contender, library
from benchmarks.softmax import DTYPES, ELEMENTS, copy_cell, one_array, sums
from tests.support import oracle as oracle_of_softmax
from tests.support.cross_entropy import oracle
from tests.support.divergence import oracle as oracle_of_divergence

SHAPES = ((8192, 151936), (16384, 50257), (65536, 4096))
DIVIDED = ((1024, 512), (65536, 512), (8192, 4096), (65536, 4096), (65536, 16384))
SAMPLED = tuple((rows, 128256) for rows in (64, 512, 2048, 8192))
OPS = ("softmax", "log_softmax", "logsumexp", "entropy", "cross_entropy")
SCALES = ("", "scale=0.7", "scales=1")  # none, one number, a number for each row
CLIP, BONUS = 0.2, 0.01  # of PPO
BY = ("", "p", "q", "pq")  # the arrays by which divergences are differentiated


def cells(shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[Cell]:
    """All cells: copies, with which the others are compared, and each op in both passes."""
    found = [copy_cell(dtype, ELEMENTS if shapes is SHAPES else math.prod(shapes[0])) for dtype in DTYPES]
    for shape in shapes:
        for dtype in DTYPES:
            for backward in (False, True):
                found.append(entropy_cell(dtype, shape, backward))
                found += [log_probs_cell(dtype, shape, backward, scale) for scale in SCALES]
            found.append(ppo_cell(dtype, shape))
            found += [divergence_cell(op, dtype, shape, by) for op in ("kl", "js") for by in BY]
    divided = DIVIDED if shapes is SHAPES else shapes
    found += [divided_cell(op, dtype, shape) for op in OPS for shape in divided for dtype in DTYPES]
    found += [divided_cell("cross_entropy", dtype, shape, backward=True) for shape in divided for dtype in DTYPES]
    sampled = SAMPLED if shapes is SHAPES else shapes
    return [*found, *(divided_samples_cell(dtype, shape) for shape in sampled for dtype in DTYPES)]


def _inputs(dtype, shape):
    """Makes logits, ids, a number for each row to scale by, and a cotangent of each result."""

    def inputs(key, hurtful):
        rows, classes = shape
        keys = jax.random.split(jax.random.fold_in(key, 3), 4)
        ids = jax.random.randint(keys[0], (rows,), 0, classes)
        scale = jax.random.uniform(keys[1], (rows,), minval=0.5, maxval=1.5)
        return *one_array(shape, dtype)(key, hurtful), ids, scale, *(jax.random.normal(k, (rows,)) for k in keys[2:])

    return inputs


def _scale_of(text: str, scale: Any) -> Any:
    """Returns the scale that the options of a cell name."""
    return {"": None, "scale=0.7": 0.7, "scales=1": scale}[text]


def _entropy(log_p):
    """Computes entropies as libraries of reinforcement learning write them: a weight of 0 adds nothing."""
    p = jnp.exp(log_p)
    return -jnp.sum(p * jnp.where(p > 0, log_p, 0), -1)


def _bytes(dtype, shape, backward) -> int:
    return (3 if backward else 1) * math.prod(shape) * jnp.dtype(dtype).itemsize


def _with_gradient(f, backward):
    """Returns the results of `f` at logits, and with `backward` the gradient for their cotangents."""
    if not backward:
        return f

    def both(x, ids, scale, *cotangents):
        results, pull = jax.vjp(lambda x: f(x, ids, scale), x)
        return *results, pull(tuple(cotangents[: len(results)]))[0]

    return both


def entropy_cell(dtype: str, shape: tuple[int, int], backward: bool) -> Cell:
    def truth(x, ids, scale, cotangent, *_):
        found = oracle.log_probs(x, ids)
        zeros = np.zeros_like(cotangent)
        return [found.entropy, *([found.gradient(zeros, cotangent, zeros)] if backward else [])]

    def of_jax(x, *_):
        return (_entropy(jax.nn.log_softmax(x.astype(jnp.float32))),)

    def ours(x, *_):
        return (library.entropy(x),)

    contenders = [
        Contender(OURS, lambda: _with_gradient(ours, backward)),
        Contender("jax.numpy", lambda: _with_gradient(of_jax, backward)),
    ]
    pass_, peers = "forward+backward" if backward else "forward", () if backward else sums()
    return Cell(
        "entropy", pass_, dtype, shape, "", _bytes(dtype, shape, backward), _inputs(dtype, shape), (*contenders, *peers), truth
    )


def log_probs_cell(dtype: str, shape: tuple[int, int], backward: bool, scale_text: str = "") -> Cell:
    def truth(x, ids, scale, of_log_p, of_entropy):
        scale = _scale_of(scale_text, scale if scale is None else np.asarray(scale)[:, None])
        found = oracle.log_probs(x, ids, scale=None if scale is None else np.float32(scale))
        gradient = [found.gradient(of_log_p, of_entropy, np.zeros_like(of_log_p))] if backward else []
        return [found.log_p, found.entropy, *gradient]

    def of_jax(x, ids, scale, *_):
        scale = _scale_of(scale_text, scale[:, None])
        log_p = jax.nn.log_softmax(x.astype(jnp.float32) * (1 if scale is None else scale))
        return jnp.take_along_axis(log_p, ids[:, None], 1)[:, 0], _entropy(log_p)

    def ours(x, ids, scale, *_):
        return library.log_probs(x, ids, scale=_scale_of(scale_text, scale), return_entropy=True)

    contenders = (
        Contender(OURS, lambda: _with_gradient(ours, backward)),
        Contender("jax.numpy", lambda: _with_gradient(of_jax, backward)),
    )
    options = f"entropy=1 {scale_text}".strip()
    pass_ = "forward+backward" if backward else "forward"
    return Cell(
        "log_probs", pass_, dtype, shape, options, _bytes(dtype, shape, backward), _inputs(dtype, shape), contenders, truth
    )


def ppo_cell(dtype: str, shape: tuple[int, int]) -> Cell:
    def loss_of(log_p, entropy, old, advantages):
        ratio = jnp.exp(log_p - old)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        return -jnp.sum(jnp.minimum(ratio * advantages, clipped * advantages) + BONUS * entropy) / shape[0]  # of all rows

    def truth(x, ids, scale, old, advantages):
        del scale
        found = oracle.log_probs(x, ids)
        n, ratio = shape[0], np.exp(found.log_p.value - old)  # rows may be some of them
        is_inside = (ratio * advantages <= np.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages) & (ratio > 0)
        return [
            found.gradient(-np.where(is_inside, ratio * advantages, 0) / n, np.full(len(ids), -BONUS / n), np.zeros(len(ids)))
        ]

    def with_old(key, hurtful):
        del hurtful  # the ratio of two log-probabilities of -inf is NaN
        x, ids, scale, noise, advantages = _inputs(dtype, shape)(key, False)
        log_p = jax.jit(lambda x, ids: library.log_probs(x, ids))(x, ids)
        return x, ids, scale, log_p + 0.05 * noise, advantages

    def ours(x, ids, scale, old, advantages):
        del scale

        def loss(x):
            log_p, entropy = library.log_probs(x, ids, return_entropy=True)
            return loss_of(log_p, entropy, old, advantages)

        return jax.grad(loss)(x)

    def of_jax(x, ids, scale, old, advantages):
        del scale

        def loss(x):
            log_p = jax.nn.log_softmax(x.astype(jnp.float32))
            return loss_of(jnp.take_along_axis(log_p, ids[:, None], 1)[:, 0], _entropy(log_p), old, advantages)

        return jax.grad(loss)(x)

    contenders = (Contender(OURS, lambda: ours), Contender("jax.numpy", lambda: of_jax))
    return Cell("ppo", "forward+backward", dtype, shape, "", _bytes(dtype, shape, True), with_old, contenders, truth)


def divergence_cell(op: str, dtype: str, shape: tuple[int, int], by: str = "") -> Cell:
    """Returns the cell of a divergence of two arrays, with the gradient by none, one or both of them."""
    name = f"{op}_divergence"

    def inputs(key, hurtful):
        keys = jax.random.split(jax.random.fold_in(key, 4))
        arrays = (*one_array(shape, dtype)(key, hurtful), *one_array(shape, dtype)(keys[0], False))
        return *arrays, jax.random.normal(keys[1], shape[:1])

    def with_gradients(f):
        def run(x, y, cotangent):
            if not by:
                return (f(x, y),)
            moving = {name: array for name, array in (("p", x), ("q", y)) if name in by}
            value, pull = jax.vjp(lambda moving: f(moving.get("p", x), moving.get("q", y)), moving)
            return value, *pull(cotangent)[0].values()

        return lambda: run

    def of_jax(x, y):
        log_p, log_q = (jax.nn.log_softmax(each.astype(jnp.float32)) for each in (x, y))
        if op == "kl":
            p = jnp.exp(log_p)
            return jnp.sum(p * jnp.where(p > 0, log_p - log_q, 0), -1)
        log_m = jnp.logaddexp(log_p, log_q) - math.log(2)
        terms = (jnp.exp(log) * jnp.where(log > -jnp.inf, log - log_m, 0) for log in (log_p, log_q))
        return jnp.sum(sum(terms) / 2, -1)

    def truth(x, y, cotangent):
        found = getattr(oracle_of_divergence, name)(x, y)
        gradients: dict[str, Any] = dict(zip("pq", found.gradients(cotangent), strict=True)) if by else {}
        return [found.value, *(gradients[name] for name in by)]

    contenders = (Contender(OURS, with_gradients(getattr(library, name))), Contender("jax.numpy", with_gradients(of_jax)))
    moved = (4 + len(by) if by else 2) * math.prod(shape) * jnp.dtype(dtype).itemsize
    pass_, options = ("forward+backward", f"by={by}") if by else ("forward", "")
    return Cell(op, pass_, dtype, shape, options, moved, inputs, contenders, truth)


def divided_cell(op: str, dtype: str, shape: tuple[int, int], backward: bool = False) -> Cell:
    """Returns the cell of an op of `logits / T`, with a T for each row, and with `backward` its gradient by the logits."""

    def of(module, divides=True):
        def call(x, temperature, ids, cotangent):
            def value(x):
                x = x / temperature[:, None].astype(x.dtype) if divides else x
                return _op_of_logits(module, op, x, ids)

            if not backward:
                return value(x)
            found, pull = jax.vjp(value, x)
            return found, pull(cotangent)[0]

        return lambda: call

    def inputs(key, hurtful):
        x, ids, temperature, cotangent, _ = _inputs(dtype, shape)(key, hurtful)
        return x, temperature, ids, cotangent

    def truth(x, temperature, ids, cotangent, divides=True):
        # A product that a kernel takes in is rounded to float32, and one that is written to the dtype of the logits.
        number = np.asarray(temperature)[:, None].astype(x.dtype).astype(np.float64) if divides else 1.0
        unit = 2.0 ** (-8 if dtype == "bfloat16" else -22)
        with np.errstate(all="ignore"):
            scores = np.asarray(x).astype(np.float64) / number
        slack = 4 * unit * np.max(np.nan_to_num(np.abs(scores), posinf=0, neginf=0), -1)
        found = oracle.log_probs(scores, ids)
        match op:
            case "cross_entropy":
                truths = [(oracle_of_softmax.Truth(-found.log_p.value, found.log_p.budget), False)]
            case "entropy":
                truths = [(found.entropy, True)]
            case _:
                truths = [(getattr(oracle_of_softmax, op)(scores, axis=-1), op == "softmax")]
        if backward:
            zeros = np.zeros_like(cotangent)
            gradient = found.gradient(-cotangent, zeros, zeros)
            truths.append((oracle_of_softmax.Truth(gradient.value / number, gradient.budget / number), True))
        return [_rounded(each, slack, is_relative) for each, is_relative in truths]

    contenders = (
        Contender(OURS, of(library)),
        Contender("jax.nn", of(jax.nn)),
        Contender("undivided", of(library, divides=False), truth=functools.partial(truth, divides=False)),
    )
    passes = 3 if backward else 2 if op in ("softmax", "log_softmax") else 1
    moved = passes * math.prod(shape) * jnp.dtype(dtype).itemsize
    pass_ = "forward+backward" if backward else "forward"
    return Cell(op, pass_, dtype, shape, "divided=1", moved, inputs, contenders, truth)


def _op_of_logits(module: Any, op: str, x: jax.Array, ids: jax.Array) -> jax.Array:
    """Computes an op by `module`: the library, or `jax.nn`, which has no losses."""
    if op == "cross_entropy" and module is not jax.nn:
        return module.cross_entropy(x, ids)
    if op not in ("cross_entropy", "entropy") or module is not jax.nn:
        return getattr(module, op)(x, axis=-1)
    log_p = jax.nn.log_softmax(x.astype(jnp.float32))
    return _entropy(log_p) if op == "entropy" else -jnp.take_along_axis(log_p, ids[:, None], 1)[:, 0]


def _rounded(truth: oracle_of_softmax.Truth, slack: np.ndarray, is_relative: bool) -> oracle_of_softmax.Truth:
    """Widens a budget by what scores that err by `slack` change: as much, or in proportion to the value."""
    slack = slack[:, None] if truth.value.ndim > 1 else slack
    return oracle_of_softmax.Truth(truth.value, truth.budget + slack * (np.abs(truth.value) if is_relative else 1))


def divided_samples_cell(dtype: str, shape: tuple[int, int]) -> Cell:
    """Returns the cell of samples of `logits / T`, with a T for each row."""

    def draw(categorical, x, temperature, key, divides=True):
        return categorical(key, x / temperature[:, None].astype(x.dtype) if divides else x)

    def inputs(key, hurtful):
        temperature = jax.random.uniform(jax.random.fold_in(key, 3), shape[:1], minval=0.5, maxval=1.5)
        return *one_array(shape, dtype)(key, hurtful), temperature, jax.random.fold_in(key, 4)

    contenders = (
        Contender(OURS, lambda: functools.partial(draw, library.categorical)),
        Contender("jax.random", lambda: functools.partial(draw, jax.random.categorical), sample=top_k._in_range),
        Contender("undivided", lambda: functools.partial(draw, library.categorical, divides=False), sample=top_k._in_range),
    )

    @jax.jit
    def at_temperature(x, temperature, key):  # the reference rounds a quotient to the dtype of the logits, a kernel does not
        number = temperature.astype(x.dtype).astype(jnp.float32)
        return jaxsoftmax.categorical(key, x, temperature=number, implementation="xla")

    options = {"shared": 1, "sample": functools.partial(top_k._same_as, at_temperature)}
    moved = math.prod(shape) * jnp.dtype(dtype).itemsize
    return Cell("categorical", "forward", dtype, shape, "divided=1", moved, inputs, contenders, top_k._no_truth, **options)
