"""A timeline of the ring on two GPUs: prof.py forward|both"""
import sys, glob, gzip, json, collections, tempfile
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P, NamedSharding, Mesh, AxisType
import jaxsoftmax
N, T = 2, 32768
mesh = Mesh(np.array(jax.devices()[:N]), ("x",), axis_types=(AxisType.Explicit,))
s = NamedSharding(mesh, P(None, "x"))
args = [jax.device_put(np.asarray(jax.random.normal(jax.random.key(i), (1, T, 16, 128), jnp.bfloat16)), s) for i in range(4)]
def fwd(q, k, v): return jaxsoftmax.dot_product_attention(q, k, v, is_causal=True, zigzag=N)
def both(q, k, v, d):
    out, vjp = jax.vjp(fwd, q, k, v); return out, *vjp(d)
kind = sys.argv[1]
f = jax.jit(fwd if kind == "forward" else both); args = args[:3] if kind == "forward" else args
with jax.set_mesh(mesh):
    for _ in range(100): r = f(*args)
    jax.block_until_ready(r)
    d = tempfile.mkdtemp()
    with jax.profiler.trace(d):
        for _ in range(12): r = f(*args)
        jax.block_until_ready(r)
path = glob.glob(d + "/**/*.trace.json.gz", recursive=True)[0]
ev = json.load(gzip.open(path))["traceEvents"]
names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in ev if e.get("ph") == "M" and e["name"] in ("thread_name",)}
procs = {e["pid"]: e["args"]["name"] for e in ev if e.get("ph") == "M" and e["name"] == "process_name"}
gpus = [p for p, n in procs.items() if "GPU" in n]
for g in gpus:
    own = sorted([e for e in ev if e.get("ph") == "X" and e["pid"] == g and "Stream" in names.get((g, e["tid"]), "")], key=lambda e: e["ts"])
    big = [e for e in own if "attention" in e["name"]]
    per = len(big) // 12
    start = big[per * 8]["ts"] - 900; end = big[per * 10 - 1]["ts"] + big[per * 10 - 1]["dur"] + 600
    print("==", procs[g], "kernels a call", per)
    for e in own:
        if start <= e["ts"] <= end and (e["dur"] > 8 or "nccl" in e["name"].lower()):
            print(f"{e['ts']-start:9.1f} {e['dur']:8.1f} {names[(g, e['tid'])][:24]:24s} {e['name'][:60]}")
