import sys, time, statistics, subprocess, collections
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P, NamedSharding, Mesh, AxisType, SingleDeviceSharding
import jaxsoftmax
from jaxsoftmax.ops.attention import _devices
N, T = 2, 32768
mesh = Mesh(np.array(jax.devices()[:N]), ("x",), axis_types=(AxisType.Explicit,))
ROUNDS, SEC = int(sys.argv[1]), float(sys.argv[2])
which = sys.argv[3].split(",")
variants = [frozenset(v.split("+")) - {"now"} for v in sys.argv[4].split(",")]
host = [np.asarray(jax.random.normal(jax.random.key(i), (1, T, 16, 128), jnp.bfloat16)) for i in range(4)]
ones = [[jax.device_put(x, d) for x in host] for d in jax.devices()]
one = ones[0]
s = NamedSharding(mesh, P(None, "x"))
many = [jax.device_put(jaxsoftmax.zigzag(x, N, axis=1) if False else x, s) for x in host]
def make(kind, zig, toggles):
    def fwd(q, k, v): return jaxsoftmax.dot_product_attention(q, k, v, is_causal=True, **({"zigzag": N} if zig else {}))
    def both(q, k, v, d):
        out, vjp = jax.vjp(fwd, q, k, v); return out, *vjp(d)
    f = jax.jit(fwd if kind == "forward" else both)
    args = many if zig else one
    args = args[:3] if kind == "forward" else args
    from jaxsoftmax._gpu import tiles
    tiles._MOST_WAVES = 1 if "flat" in toggles else 2 if "two" in toggles else 4
    getattr(_devices,"TOGGLES",set()).clear(); getattr(_devices,"TOGGLES",set()).update(toggles)
    jax.clear_caches()
    if zig:
        with jax.set_mesh(mesh): c = f.lower(*args).compile()
    else: c = f.lower(*args).compile()
    jax.block_until_ready(c(*args))
    return lambda: c(*args)
for kind in which:
    runs = collections.OrderedDict()
    for v in variants: runs["+".join(sorted(v)) or "now"] = make(kind, True, v)
    def go(f, seconds):
        jax.block_until_ready(f()); t = time.perf_counter(); n = 0
        while time.perf_counter() - t < seconds:
            for _ in range(20): r = f()
            jax.block_until_ready(r); n += 20
        return (time.perf_counter() - t) / n * 1e6
    names = list(runs); go(runs[names[0]], 2.0)
    times = {n: [] for n in runs}
    for r in range(ROUNDS):
        for n in names if r % 2 == 0 else names[::-1]:
            go(runs[n], 0.3); times[n].append(go(runs[n], SEC))
            clocks = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout.split("\n") if False else ""
    for n, t in times.items():
        print(f"sustained {kind:8s} {n:14s} mean {statistics.mean(t):9.1f} median {statistics.median(t):9.1f} ", " ".join(f"{x:.0f}" for x in t), flush=True)
