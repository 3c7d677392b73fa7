"""PTX of the forward kernel of one kind: sass.py behind|key_lengths|causal|full"""
import os, sys
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
sys.path.insert(0, "/work/main")
import jax, jax.numpy as jnp, functools
from tests.core import xla_cuda
from jaxsoftmax.ops.attention import mosaic, primitive
from jaxsoftmax._gpu.target import HOPPER
T = 16384
A = dict.fromkeys(primitive.ATTENTION.by_name)
S = xla_cuda.sharding()
def sh(*s, d=jnp.bfloat16): return jax.ShapeDtypeStruct(s, d, sharding=S)
x = sh(1, T, 16, 128)
kind = sys.argv[1]
win = (None, 0) if "causal" in kind else (None, None)
more = {}
if "segments" in kind: more = {"query_segments": sh(1, T, d=jnp.int32), "key_segments": sh(1, T, d=jnp.int32)}
if "lengths" in kind: more = {"key_lengths": sh(1, d=jnp.int32)}
names = list(more)
def f(q, k, v, *m):
    return mosaic.dot_product_attention(target=HOPPER, scale=128**-.5, soft_cap=None, dropout_rate=0.0, window=win, **(A | {"query": q, "key": k, "value": v} | dict(zip(names, m))))
jax.jit(f, out_shardings=S).lower(x, x, x, *more.values()).compile()
