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
    one = ones[0]
    runs["one device"] = make(kind, False, ())
    one = ones[1]
    runs["other device"] = make(kind, False, ())
    for v in variants: runs["+".join(sorted(v)) or "now"] = make(kind, True, v)
    times = {n: [] for n in runs}
    def timed(f, seconds):
        jax.block_until_ready(f()); t = time.perf_counter(); jax.block_until_ready([f() for _ in range(2)][-1]); n = max(5, int(seconds / ((time.perf_counter() - t) / 2)))
        t = time.perf_counter()
        for _ in range(n): r = f()
        jax.block_until_ready(r); return (time.perf_counter() - t) / n * 1e6
    for r in range(ROUNDS):
        for n, f in runs.items(): times[n].append(timed(f, SEC))
    ref = statistics.median(times["one device"])
    for n, t in times.items():
        print(f"{kind:8s} {n:18s} median {statistics.median(t):9.1f} min {min(t):9.1f} scaling {ref/2/statistics.median(t):.3f}  ", " ".join(f"{x:.0f}" for x in t), flush=True)
