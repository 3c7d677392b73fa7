"""What Triton's kernels compute under `vmap` and on shards, in its interpreter; `test_triton.py` runs this in a process."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from jaxsoftmax._triton import attention_launch

from ..support import cases, kernels, triton_kernels
from ..support.triton_ops import AXES, OPS, SIZES, WAYS, mapped, specs_of_results, stacked, with_gradient

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels run where a custom call would be made for a GPU; those of attention in one block."""
    triton_kernels.interpret(monkeypatch, triton_kernels.run_in_jax)
    monkeypatch.setattr(attention_launch, "tiling_for", lambda *args: attention_launch.AttentionTiling(32, 32, 4, 1))
    with kernels.target(triton_kernels.target_of((8, 0)), interpreted=True), kernels.anew():
        yield


def arrays(types):
    """Arrays of these types, in which no row is hidden as a whole."""
    rng = np.random.default_rng(0)
    make = {
        "bool": lambda shape: rng.random(shape) < 0.8,
        "int32": lambda shape: rng.integers(0, 12, shape, np.int32),
        "float32": lambda shape: rng.standard_normal(shape).astype(np.float32),
    }
    return [make[a.dtype.name](a.shape) for a in types]


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), actual, expected)


# Interpreted kernels are slow. By default each op goes two ways, in turn, and all the ways are gone.
TURNS = [
    pytest.param(name, way, marks=cases.slow_unless((place + index) % 3 == 0))
    for place, name in enumerate(OPS)
    for index, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("name", "way"), TURNS)
def test_a_vmap_of_values_and_gradients(name, way):
    op = OPS[name]
    levels = WAYS[way](op)
    given = arrays(stacked(op.operands, levels))
    f = jax.jit(mapped(with_gradient(op), levels))
    cases.assert_ran("triton", f, *given)
    assert_close(f(*given), mapped(with_gradient(op, "xla"), levels)(*given))


@pytest.mark.parametrize("name", OPS)
def test_a_shard_map_of_values_and_gradients(name):
    op, given = OPS[name], arrays(OPS[name].operands)
    mesh = jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    shards = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(given, op.specs, strict=False)]
    f = jax.shard_map(with_gradient(op), mesh=mesh, in_specs=op.specs[:-1], out_specs=specs_of_results(op, "with gradient"))
    assert_close(jax.jit(f)(*shards), with_gradient(op, "xla")(*given))
