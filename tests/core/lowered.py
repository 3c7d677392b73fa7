"""Prints a hash of each program of the public functions and of their gradients; `test_lowered.py` runs it.

    python -m tests.core.lowered [--every] [--reversed]

Those of them for the CPU, and a few for CUDA, that together have what all have; with `--every`, all of them for both, which
takes minutes. `--reversed` lowers the last one first. Where Triton is installed, programs of its kernels are among them.
"""

import functools
import hashlib
import json
import sys

import jax
import jax.numpy as jnp

import jaxsoftmax
from jaxsoftmax import online
from jaxsoftmax._triton import availability
from jaxsoftmax.flax import attention_fn, attention_fn_with_rope


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS, WHERE = shaped(8, 256), shaped(8, 256, dtype=jnp.bool_)
QUERY, KEY = (shaped(2, 128, heads, 64, dtype=jnp.bfloat16) for heads in (4, 2))
LONG = shaped(1, 4224, 1, 64)  # which the reference cuts into tiles
MASK, BIAS, SINKS = shaped(2, 1, 128, 128, dtype=jnp.bool_), shaped(1, 4, 128, 128), shaped(4)
LENGTHS, SEGMENTS = shaped(2, dtype=jnp.int32), shaped(2, 128, dtype=jnp.int32)
HIDDEN, WEIGHT, LABELS = shaped(8, 64, dtype=jnp.bfloat16), shaped(64, 4096, dtype=jnp.bfloat16), shaped(8, dtype=jnp.int32)
PAGES, SCALES, TABLE = shaped(9, 64, 2, 64, dtype=jnp.int8), shaped(9, 2), shaped(2, 4, dtype=jnp.int32)
TOKEN = shaped(2, 1, 4, 64, dtype=jnp.bfloat16)
DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.PRNGKey(0)}

# What attention is called with beside query, key and value: operands and options.
FEATURES = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "window and scale": ({}, {"local_window_size": (30, 5), "scale": 0.2}),
    "mask": ({"mask": MASK}, {}),
    "bias": ({"bias": BIAS}, {}),
    "segments": ({"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS}, {}),
    "lengths": ({"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}, {}),
    "sinks": ({"sinks": SINKS}, {}),
    "dropout": ({}, DROPOUT),
    "dropout that is broadcast": ({}, DROPOUT | {"broadcast_dropout": True}),
    "soft cap": ({}, {"logits_soft_cap": 3.0}),
    "deterministic": ({}, {"deterministic_gradients": True, "is_causal": True}),
    "means of masked rows": ({"mask": MASK}, {"fully_masked_rows": "mean"}),
}
EVERYTHING = (
    {name: operand for operands, _ in FEATURES.values() for name, operand in operands.items()},
    {"logits_soft_cap": 3.0, "local_window_size": (30, 5), "return_residual": True} | DROPOUT,
)


def attend(operands, attention=jaxsoftmax.dot_product_attention, **options):
    return attention(**operands, **options)


def combined(x):
    """Softmax of the two halves of rows, by what `online` has."""
    left, right = x[:, :128], x[:, 128:]
    state = online.push(online.merge(online.lift(left), online.identity((8,))), right)
    return online.finish(state).m, online.weights(x, state.m)


def rotated(x, positions=None):
    positions = jnp.arange(x.shape[-2], dtype=jnp.float32) if positions is None else positions
    return x * jnp.cos(positions)[:, None].astype(x.dtype)


def moving_of(operands):
    """Those that may have a gradient or a tangent."""
    return {name: a for name, a in operands.items() if jnp.issubdtype(a.dtype, jnp.floating)}


def with_gradient(f):
    """The sum of what `f` gives, of one tree of arrays, and its gradient in those of them that may have one."""

    def both(operands):
        def total(moving):
            return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in jax.tree.leaves(f(operands | moving)))

        return jax.value_and_grad(total)(moving_of(operands))

    return both


NEITHER, CPU, BOTH = (), ("cpu",), ("cpu", "cuda")


def programs():
    """By name: functions, the type of their argument, and the platforms that they are lowered for without `--every`."""
    for name in ("softmax", "log_softmax", "logsumexp"):
        op = functools.partial(getattr(jaxsoftmax, name), axis=-1)
        options = {} if name == "logsumexp" else {"scale": 0.5, "dtype": jnp.bfloat16}
        yield name, with_gradient(lambda given, op=op: op(given["x"])), {"x": ROWS}, BOTH if name == "softmax" else CPU
        masked = with_gradient(lambda given, op=op, options=options: op(given["x"], where=given["where"], **options))
        yield f"{name}, where", masked, {"x": ROWS, "where": WHERE}, CPU
        yield f"{name}, tangent", lambda given, op=op: jax.jvp(op, [given["x"]], [given["x"]]), {"x": ROWS}, CPU
    yield "online", with_gradient(lambda given: combined(given["x"])), {"x": ROWS}, BOTH
    qkv = {"query": QUERY, "key": KEY, "value": KEY}
    for name, (operands, options) in FEATURES.items():
        own = CPU if name in ("plain", "deterministic") else NEITHER  # the other features are in "everything"
        yield f"attention, {name}", with_gradient(functools.partial(attend, **options)), qkv | operands, own
    operands, options = EVERYTHING
    everything = functools.partial(attend, **options)
    yield "attention, everything", with_gradient(everything), qkv | operands, BOTH

    def tangent(given):
        return jax.jvp(lambda moving: everything(given | moving), [moving_of(given)], [moving_of(given)])

    yield "attention, tangent", tangent, qkv | operands, BOTH
    yield "attention, in tiles", with_gradient(functools.partial(attend, is_causal=True)), dict.fromkeys(qkv, LONG), CPU
    with_rope = functools.partial(attention_fn_with_rope, rope=rotated)
    for name, attention in (("attention_fn", attention_fn), ("attention_fn_with_rope", with_rope)):
        f = functools.partial(attend, attention=attention, **DROPOUT, fully_masked_rows="mean")
        yield name, with_gradient(f), qkv | {"mask": MASK, "bias": BIAS}, CPU
    yield from programs_of_losses_and_samples()
    if availability.missing() is None:
        yield from programs_of_triton(qkv)


def programs_of_losses_and_samples():
    loss = functools.partial(jaxsoftmax.cross_entropy, ignore_index=-1, z_loss=1e-4)
    yield "cross_entropy", with_gradient(lambda given: loss(**given)), {"logits": ROWS, "labels": LABELS}, BOTH
    linear = functools.partial(jaxsoftmax.linear_cross_entropy, reduction="sum")
    yield "linear_cross_entropy", lambda given: linear(**given), {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS}, CPU
    policy = functools.partial(jaxsoftmax.linear_log_probs, temperature=0.7, return_entropy=True)
    yield "linear_log_probs", lambda given: policy(**given), {"hidden": HIDDEN, "weight": WEIGHT, "tokens": LABELS}, CPU
    both = {"p_logits": ROWS, "q_logits": ROWS}
    for name in ("kl_divergence", "js_divergence"):
        divergence = getattr(jaxsoftmax, name)
        yield name, with_gradient(lambda given, divergence=divergence: divergence(**given)), both, BOTH
    for name in ("top_k", "softmax_top_k"):
        op = functools.partial(getattr(jaxsoftmax, name), k=4)
        yield name, with_gradient(lambda given, op=op: op(given["x"])), {"x": ROWS}, BOTH if name == "top_k" else CPU
    sample = functools.partial(jaxsoftmax.categorical, jax.random.key(0))
    yield "categorical", lambda given: sample(given["x"]), {"x": shaped(8, 32000)}, BOTH
    cache = {"key_pages": PAGES, "value_pages": PAGES, "key_scale": SCALES, "value_scale": SCALES}
    cache |= {"page_table": TABLE, "key_value_seq_lengths": LENGTHS}
    yield "paged_attention", lambda given: jaxsoftmax.cache.paged_attention(**given), cache | {"query": TOKEN}, BOTH


def programs_of_triton(qkv):
    forced = {"implementation": "triton"}
    softmax, loss = (functools.partial(getattr(jaxsoftmax, name), **forced) for name in ("softmax", "cross_entropy"))
    yield "softmax, triton", with_gradient(lambda given: softmax(given["x"])), {"x": ROWS}, BOTH
    yield "cross_entropy, triton", with_gradient(lambda given: loss(**given)), {"logits": ROWS, "labels": LABELS}, BOTH
    yield "attention, triton", with_gradient(functools.partial(attend, **forced)), qkv, BOTH


def main():
    order = list(programs())
    hashes = {}
    for name, f, argument, few in order[::-1] if "--reversed" in sys.argv else order:
        platforms = BOTH if "--every" in sys.argv else few
        traced = jax.jit(f).trace(argument) if platforms else None
        for platform in platforms[name.endswith("triton") :]:  # which is forced, and does not lower for the CPU
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            hashes[f"{name}, {platform}"] = hashlib.sha256(text.encode()).hexdigest()
    print(json.dumps(hashes))


if __name__ == "__main__":
    main()
