"""Compiles the ring for N H200s that are not there: argv forward|both [opt=val ...]; env N, CAUSAL, T, KH."""
import os, sys, re
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P, NamedSharding, AxisType, Mesh
sys.path.insert(0, "/work/main")
from tests.core import xla_cuda
import jaxsoftmax
N = int(os.environ.get("N", 2)); causal = bool(int(os.environ.get("CAUSAL", 1))); T = int(os.environ.get("T", 16384)) * N
KH = int(os.environ.get("KH", 16))
m = xla_cuda.mesh((N,), ("x",))
mesh = Mesh(m.devices, ("x",), axis_types=(AxisType.Explicit,))
s = NamedSharding(mesh, P(None, "x"))
q = jax.ShapeDtypeStruct((1, T, 16, 128), jnp.bfloat16, sharding=s)
k = jax.ShapeDtypeStruct((1, T, KH, 128), jnp.bfloat16, sharding=s)
opts = dict(a.split("=") for a in sys.argv[2:])
from jaxsoftmax.ops.attention import _devices
getattr(_devices,'TOGGLES',set()).update(os.environ.get('TOG','').split('+'))
def fwd(q, k, v):
    return jaxsoftmax.dot_product_attention(q, k, v, is_causal=causal, deterministic=bool(os.environ.get("DET")), **({"zigzag": N} if causal else {}))
def both(q, k, v, d):
    out, vjp = jax.vjp(fwd, q, k, v)
    return out, *vjp(d)
f, args = (fwd, (q, k, k)) if sys.argv[1] == "forward" else (both, (q, k, k, q))
with jax.set_mesh(mesh):
    lowered = jax.jit(f).lower(*args)
    c = lowered.compile(compiler_options=opts or None)
t = c.as_text()
open("/tmp/ring.hlo", "w").write(t)
ma = c.memory_analysis()
print("temporaries MB", ma.temp_size_in_bytes / 1e6)
entry = t[t.index("ENTRY"):]
for line in entry.splitlines():
    g = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\S+(?:, \S+)*?) ([\w\-]+)\(", line)
    if g and g.group(3) not in ("parameter", "bitcast", "get-tuple-element", "constant", "tuple"):
        shapes = re.findall(r"\w+\[[\d,]*\]", line.split(g.group(3) + "(")[0])
        print(g.group(3), g.group(1)[:60], shapes[:4])
