"""Prints a hash of the program of every public function with its gradient, for the CPU and CUDA; `test_lowered.py` runs it."""

import functools
import hashlib
import json

import jax
import jax.numpy as jnp

import jaxsoftmax

ROWS = jax.ShapeDtypeStruct((8, 256), jnp.float32)
QUERY, KEY = (jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16) for heads in (4, 2))
BIAS, SINKS = jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
MASK = jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bool_)
LONG = jax.ShapeDtypeStruct((1, 4224, 1, 64), jnp.float32)  # which the reference cuts into tiles


def attend(query, key, value, bias=None, sinks=None, mask=None, **options):
    return jaxsoftmax.dot_product_attention(query, key, value, bias, mask, sinks=sinks, is_causal=True, **options)


def everything(*args):
    options = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0), "logits_soft_cap": 3.0, "return_residual": True}
    return attend(*args, **options)


def with_gradient(f, args):
    moving = tuple(index for index, arg in enumerate(args) if arg.dtype != bool)
    total = lambda *args: sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in jax.tree.leaves(f(*args)))  # noqa: E731
    return jax.value_and_grad(total, moving)


def programs():
    """Functions with the types of their arguments and the platforms that they are lowered for."""
    for name in ("softmax", "log_softmax", "logsumexp"):
        yield name, with_gradient(functools.partial(getattr(jaxsoftmax, name), axis=-1), [ROWS]), [ROWS], ("cpu", "cuda")
    args = [QUERY, KEY, KEY, BIAS, SINKS, MASK]
    yield "attention", with_gradient(everything, args), args, ("cpu", "cuda")
    yield "its tangent", lambda *args: jax.jvp(everything, args, args), args[:5], ("cpu",)
    yield "in tiles", with_gradient(attend, [LONG] * 3), [LONG] * 3, ("cpu",)


def main():
    hashes = {}
    for name, f, args, platforms in programs():
        traced = jax.jit(f).trace(*args)
        for platform in platforms:
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            hashes[f"{name}, {platform}"] = hashlib.sha256(text.encode()).hexdigest()
    print(json.dumps(hashes))


if __name__ == "__main__":
    main()
