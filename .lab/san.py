import jax, jax.numpy as jnp, numpy as np, jaxsoftmax
from jax.sharding import PartitionSpec as P, NamedSharding, AxisType
from jaxsoftmax import explain
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
rng = np.random.default_rng(0)
for rows, cols in ((5, 300000), (64, 40000)):
    for f, g in ((jaxsoftmax.softmax, jax.nn.softmax), (jaxsoftmax.log_softmax, jax.nn.log_softmax)):
        x, d = (rng.standard_normal((rows, cols)).astype(np.float32) for _ in range(2))
        def pull(f, x, d):
            out, vjp = jax.vjp(f, x); return out, *vjp(d)
        with jax.set_mesh(mesh):
            a = [jax.device_put(y, NamedSharding(mesh, P(None, "x"))) for y in (x, d)]
            print([str(e.implementation) for e in explain(lambda x, d: pull(f, x, d), *a, platform="cuda")])
            ours = jax.jit(lambda x, d: pull(f, x, d))(*a)
        with jax.default_device(jax.devices("cpu")[0]):
            ref = pull(g, jnp.asarray(x), jnp.asarray(d))
        print(rows, cols, [float(np.max(np.abs(np.asarray(o) - np.asarray(r)))) for o, r in zip(ours, ref)], flush=True)
