"""What Triton's kernel computes for cross-entropy, in its interpreter; `test_triton.py` runs this file in a process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax.ops.cross_entropy import primitive
from jaxsoftmax.ops.cross_entropy import triton as ours
from jaxsoftmax.ops.cross_entropy.xla import NO_ROW

from ..support import cases, oracle, triton_kernels
from ..support.cross_entropy.cases import FINITE, OPTIONS, head_of, labelled, without_ignored
from ..support.cross_entropy.oracle import cross_entropy as truth
from ..support.softmax.spread import ROWS, spreading, stacked

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of NaN and infinity

# Shapes, of which the first axis is that of kinds of input, and the axis of the classes.
SHAPES = [((2, 1), 1), ((2, 37), 1), ((1, 601), 1), ((2, 67, 3), 1), ((1, 40, 17), 1)]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    triton_kernels.interpret(monkeypatch)


@pytest.fixture(params=ROWS)
def target(request, monkeypatch):
    return spreading(request.param, monkeypatch)


OPERATIONS = triton_kernels.operations(primitive)


def computed(name, operands, target, **params):
    """Returns the results of a plan for NumPy arrays by name."""
    return triton_kernels.forced(ours, OPERATIONS[name], operands, target, **params).run(**operands)


def params_of(options, axis):
    cap = options.get("logits_soft_cap")
    return {"axes": (axis,), "dtype": jnp.float32, "soft_cap": None if cap is None else float(cap)}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", cases.quick("float32", slow=["bfloat16", "float16"]))
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=cases.ident)
def test_losses_and_gradients(target, shape, axis, dtype, options):
    options = without_ignored(OPTIONS[options])
    kinds = [*FINITE, *([] if options.get("label_smoothing") else ["some -inf"])]  # the mean of -inf has no derivative
    x, axis, head = stacked(shape, dtype, kinds), axis + 1, head_of(options)
    labels, classes = labelled(x.shape, axis), x.shape[axis]
    labels.flat[2:4] = classes, NO_ROW  # no class, and a row that does not count
    c = np.random.default_rng(2).standard_normal(labels.shape).astype(np.float32)
    c[labels == NO_ROW] = 0
    row_labels, row_c = (np.expand_dims(a, axis) for a in (labels, c))
    params = params_of(options, axis)
    expected = truth(x, labels, axis, **options)

    def check(found, gradient):
        loss = head.of_terms([np.squeeze(np.asarray(part), axis) for part in found], classes)[0]
        assert oracle.error(jnp.where(labels == NO_ROW, jnp.nan, loss), expected.loss) <= 1
        assert gradient.dtype == x.dtype
        assert oracle.error(gradient, expected.gradient(c)) <= 1

    has_total = options.get("label_smoothing", 0) > 0
    operands = {"x": x, "labels": row_labels}
    *found, m, d = computed("cross_entropy", operands, target, return_total=has_total, return_state=True, **params)
    numbers = jax.vjp(lambda *found: head.of_terms([jnp.squeeze(f, axis) for f in found], classes)[0], *found)[1](c)
    b, a, *total = (-np.asarray(numbers[0]), np.asarray(numbers[0] + numbers[1]), *map(np.asarray, numbers[2:]))
    saved = operands | {"m": m, "d": d, "a": a, "b": b, "c": total[0] if total else None}
    (gradient,) = computed("cross_entropy_vjp", saved, target, **(params | {"dtype": x.dtype}))
    check(found, gradient)

    before = x.copy()
    own = {"label_smoothing": options.get("label_smoothing", 0.0), "z_loss": options.get("z_loss", 0.0)}
    gradient, *found = computed("cross_entropy_gradient", operands | {"t": row_c}, target, **own, **params)
    check(found, np.asarray(gradient))
    assert x.tobytes() == before.tobytes()
