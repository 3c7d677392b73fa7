"""Kernel times of the steps of a causal zigzag ring on one GPU, sustained."""
import sys, time, functools
import jax, jax.numpy as jnp, numpy as np
from jaxsoftmax.ops.attention import mosaic, primitive
from jaxsoftmax._gpu.target import HOPPER
H, D = 16, 128
opt = {"target": HOPPER, "scale": D**-0.5, "soft_cap": None, "dropout_rate": 0.0}
A = dict.fromkeys(primitive.ATTENTION.by_name); V = dict.fromkeys(primitive.ATTENTION_VJP.by_name)
C, F = (None, 0), (None, None)
def rand(T, h=H, seed=0): return jax.random.normal(jax.random.key(seed), (1, T, h, D), jnp.bfloat16)
def timed(name, f, *args, seconds=1.0, ref=None):
    f = jax.jit(f); jax.block_until_ready(f(*args))
    def run(n):
        t = time.perf_counter()
        for _ in range(n): r = f(*args)
        jax.block_until_ready(r); return (time.perf_counter() - t) / n
    t = run(5); n = max(10, int(seconds / t)); run(n // 2); t = run(n)
    print(f"{name:50s} {t*1e6:9.1f} us" + (f"  {t*1e6/ref:.3f} of ref" if ref else ""), flush=True)
    return t * 1e6
off = jnp.zeros((1,), jnp.int32)
T = 16384
early = np.arange(T) < T // 2
def seg(a): return jnp.asarray(a.astype(np.int32))[None]
ahead = {"query_segments": seg(early), "key_segments": seg(np.zeros(T, bool))}   # late queries see all keys
behind = {"query_segments": seg(np.zeros(T, bool)), "key_segments": seg(~early)}   # all queries see early keys
q2, k2, v2 = (rand(2 * T, seed=s) for s in range(3))
q, k, v = (x[:, :T] for x in (q2, k2, v2))
def fwd(window, partial, more, q, k, v, onto=None):
    given = A | {"query": q, "key": k, "value": v} | more
    return mosaic.dot_product_attention(**opt, window=window, is_partial=partial, onto=onto, **given)
ref = timed("forward causal 32768, half", functools.partial(fwd, C, False, {}), q2, k2, v2) / 4
print("ref (quarter)", ref)
for name, fn in {
  "causal 16384": lambda: (functools.partial(fwd, C, False, {}), q, k, v),
  "causal 16384 offset": lambda: (functools.partial(fwd, C, False, {"query_offset": off}), q, k, v),
  "causal 16384 partial offset": lambda: (functools.partial(fwd, C, True, {"query_offset": off}), q, k, v),
  "full 16384x8192": lambda: (functools.partial(fwd, F, False, {}), q, k[:, :T//2], v[:, :T//2]),
  "full 8192x16384": lambda: (functools.partial(fwd, F, False, {}), q[:, :T//2], k, v),
  "behind": lambda: (functools.partial(fwd, F, False, behind), q, k, v),
  "ahead": lambda: (functools.partial(fwd, F, False, ahead), q, k, v),
}.items():
    timed(name, *fn(), ref=ref)
found = jax.jit(functools.partial(fwd, C, True, {"query_offset": off}))(q, k, v)
full2 = timed("full 16384x8192 onto", functools.partial(fwd, F, False, {}), q, k[:, :T//2], v[:, :T//2], found, ref=ref)
timed("behind onto", functools.partial(fwd, F, False, behind), q, k, v, found, ref=ref)
timed("ahead onto", functools.partial(fwd, F, False, ahead), q, k, v, found, ref=ref)
def bwd(window, partial, more, q, k, v, out, lse, d, onto=None):
    given = V | {"query": q, "key": k, "value": v, "out": out, "lse": lse, "d_out": d} | more
    return mosaic.dot_product_attention_vjp(**opt, window=window, is_partial=partial, onto=onto, wanted=("query", "key", "value"), **given)
o2, l2 = jax.jit(functools.partial(fwd, C, False, {}))(q2, k2, v2)
d2 = rand(2 * T, seed=5)
ref = timed("backward causal 32768", functools.partial(bwd, C, False, {}), q2, k2, v2, o2, l2, d2) / 4
o, l, d = o2[:, :T], l2[..., :T], d2[:, :T]
timed("bwd causal 16384", functools.partial(bwd, C, False, {}), q, k, v, o, l, d, ref=ref)
timed("bwd causal 16384 offset", functools.partial(bwd, C, False, {"query_offset": off}), q, k, v, o, l, d, ref=ref)
timed("bwd causal 16384 partial offset", functools.partial(bwd, C, True, {"query_offset": off}), q, k, v, o, l, d, ref=ref)
timed("bwd full 16384x8192", functools.partial(bwd, F, False, {}), q, k[:, :T//2], v[:, :T//2], o, l, d, ref=ref)
timed("bwd behind partial", functools.partial(bwd, F, True, behind), q, k, v, o, l, d, ref=ref)
timed("bwd ahead partial", functools.partial(bwd, F, True, ahead), q, k, v, o, l, d, ref=ref)
big = jnp.zeros((1, T, H, D), jnp.float32)
timed("bwd behind partial onto", functools.partial(bwd, F, True, behind), q, k, v, o, l, d, big, ref=ref)
timed("pack", lambda k, v: jnp.concatenate([k.ravel(), v.ravel()]), k, v)
